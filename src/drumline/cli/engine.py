"""What `generate` and `chat` share: an engine with its start-up shown, and sampling options."""

from collections.abc import Mapping

from drumline.cli.progress import Progress
from drumline.cli.verbs import EngineOptions, SamplingOptions
from drumline.core.settings import settings_of
from drumline.launcher.rank_process import Ahead
from drumline.offline.llm import LLM
from drumline.offline.sampling import SamplingParams


def started(options: EngineOptions, progress: Progress, ahead: Ahead | None) -> LLM:
    """Return the engine that `options` ask for, ready. Raises ConfigError and PeerError."""
    fields = {
        setting.field: getattr(getattr(options, setting.place[0]), setting.field)
        for setting in settings_of(EngineOptions)
    }
    try:
        progress.at("starting")
        return LLM(on_step=progress.at, ahead=ahead, **fields)
    finally:
        progress.done()


def sampling(options: SamplingOptions) -> SamplingParams:
    """Return the sampling parameters of the command line's options."""
    said = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p")
        if (value := getattr(options, name)) is not None
    }
    return SamplingParams(max_tokens=options.max_tokens, **said)


def conversation(options: SamplingOptions) -> list[Mapping[str, str]]:
    """Return the messages that a conversation begins with."""
    return [{"role": "system", "content": options.system}] if options.system else []
