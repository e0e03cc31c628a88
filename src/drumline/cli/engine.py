"""What `generate` and `chat` share: an engine with its start-up shown, and sampling options."""

import sys
from collections.abc import Mapping

from drumline.cli.verbs import EngineOptions, SamplingOptions
from drumline.core.settings import settings_of
from drumline.launcher.rank_process import Ahead
from drumline.offline.llm import LLM
from drumline.offline.sampling import SamplingParams

_CLEAR = "\r\x1b[K"


class Progress:
    """One line on a terminal's standard error that says what is being waited for."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def at(self, step: str) -> None:
        """Show a step in place of the last one."""
        if self._terminal:
            print(f"{_CLEAR}{step} …", end="", file=sys.stderr, flush=True)

    def note(self, line: str) -> None:
        """Say something that stays."""
        if self._terminal:
            print(f"{_CLEAR}{line}", file=sys.stderr, flush=True)

    def done(self) -> None:
        """Take the line away."""
        if self._terminal:
            print(_CLEAR, end="", file=sys.stderr, flush=True)


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
