"""drumline: an LLM inference engine whose ranks keep in step.

from drumline import LLM, SamplingParams
"""

import importlib
from typing import TYPE_CHECKING, Any

from drumline.core.version import VERSION

if TYPE_CHECKING:
    from drumline.offline.async_llm import AsyncLLM
    from drumline.offline.llm import LLM
    from drumline.offline.outputs import CompletionOutput, RequestOutput
    from drumline.offline.sampling import SamplingParams

__version__ = VERSION
__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

# Looked up on first use, so that no process pays for what it does not use.
_HOMES = {
    "LLM": "drumline.offline.llm",
    "AsyncLLM": "drumline.offline.async_llm",
    "CompletionOutput": "drumline.offline.outputs",
    "RequestOutput": "drumline.offline.outputs",
    "SamplingParams": "drumline.offline.sampling",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
