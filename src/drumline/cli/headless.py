"""Which flags of `drumline serve` have no effect where the ranks serve somebody else's frontend.

They are refused by name, wherever they were said: a port that nobody opens, or a key that
nobody asks for, must not look as if it were.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core.errors import ConfigError
from drumline.core.settings import Place, Setting

_SECTIONS = {"server", "chat"}
_FIELDS = {"drain_timeout", "load_balance_method"}
_DIALS = {"data_parallel_address", "data_parallel_rpc_port", "zmq_engine_index"}


def check_headless(flags: Sequence[Setting], said: Mapping[Place, Any]) -> None:
    """Raise ConfigError naming a flag that was said in vain."""
    by_place = {flag.place: flag for flag in flags}
    headless = any(value for place, value in said.items() if place[-1] == "headless")
    for place in said:
        *_, section, field = place
        if headless and (section in _SECTIONS or field in _FIELDS):
            raise ConfigError(
                by_place[place].name,
                "has no effect with --headless: the frontend that the ranks dial decides it",
            )
        if not headless and field in _DIALS:
            raise ConfigError(by_place[place].name, "has no effect without --headless")
