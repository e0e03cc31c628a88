"""The command `drumline`: find the verb, read its flags, run it, turn errors into exit codes.

Only the verb's own module is imported, once its flags are known to be right:
start-up time is what an operator feels first.
"""

import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence

from msgspec import Struct

from drumline.cli.flags import assemble, read_arguments, variable_of
from drumline.cli.verbs import Bench, Chat, Generate, Profile, Serve
from drumline.contract.startup import EXIT_FAILED, EXIT_OPERATOR
from drumline.core.config import DistributedBackend, FrontendConfig
from drumline.core.errors import ConfigError, DrumlineError
from drumline.core.settings import settings_of
from drumline.core.version import VERSION
from drumline.launcher.rank_process import Ahead

_VERBS: dict[str, tuple[type[Struct], str]] = {
    "serve": (Serve, "[MODEL]"),
    "generate": (Generate, "PROMPT|-"),
    "chat": (Chat, "[MODEL]"),
    "bench": (Bench, ""),
    "profile": (Profile, "merge FILE|DIRECTORY…"),
}
_PLAIN = {
    "env": "print what a bug report needs to know of this machine",
    "version": "print the version",
}
_OTHERS_VERBS = {
    "run": "use chat, or generate for a single answer",
    "complete": "use generate with --raw",
    "launch": "use serve",
    "start": "use serve",
}
_BROKEN_PIPE = 128 + signal.SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; return the exit status."""
    _open_standard_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Whoever read us has seen enough. What is still buffered would break at the exit again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except ConfigError as error:
        print(f"drumline: {error}", file=sys.stderr)
        return EXIT_OPERATOR
    except DrumlineError as error:
        print(f"drumline: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Give a closed standard stream the null device.

    Else the next file or socket takes its number, and whoever believes it a standard
    stream writes into it, or refuses to close it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def _run(words: list[str]) -> int:
    if not words:
        print(_overview(), file=sys.stderr)
        return EXIT_OPERATOR
    verb, rest = words[0], words[1:]
    if verb in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if verb in ("version", "--version", "-V"):
        print(f"drumline {VERSION}")
        return 0
    if verb == "env":
        from drumline.cli.env import show_environment  # noqa: PLC0415

        show_environment()
        return 0
    if verb not in _VERBS:
        raise ConfigError(verb, _no_such(verb))
    command, positional = _VERBS[verb]
    flags = settings_of(command)
    if "-h" in rest or "--help" in rest:
        from drumline.cli.help import usage  # noqa: PLC0415

        print(usage(verb, (command.__doc__ or "").strip(), positional, flags))
        return 0
    arguments = read_arguments(flags, rest)
    for note in arguments.notes:
        print(f"drumline: note: {note}", file=sys.stderr)
    prompts = arguments.positionals
    if command not in (Generate, Bench, Profile):
        model = _model_named(prompts)
        if model is not None:
            place = next(flag.place for flag in flags if flag.field == "model")
            if place in arguments.said:
                raise ConfigError("MODEL", f"{model!r} is named beside --model; name one")
            arguments.said[place] = model
        prompts = []
    others = {variable_of(flag) for kind, _ in _VERBS.values() for flag in settings_of(kind)}
    choices = assemble(command, flags, arguments, os.environ, others)
    with contextlib.ExitStack() as closing:
        ahead = closing.enter_context(Ahead()) if _wants_one_rank(choices, prompts) else None
        return _verb(choices, prompts, ahead)()


def _no_such(verb: str) -> str:
    if verb in _OTHERS_VERBS:
        return f"no such verb; {_OTHERS_VERBS[verb]}"
    known = [*_VERBS, *_PLAIN]
    near = difflib.get_close_matches(verb, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return f"no such verb; {hint}"


def _model_named(positionals: list[str]) -> str | None:
    if len(positionals) > 1:
        raise ConfigError("MODEL", f"one model is served, these are {len(positionals)} words")
    return positionals[0] if positionals else None


def _wants_one_rank(choices: Struct, prompts: list[str]) -> bool:
    """Whether the verb will start one rank, which had better begin to load before the verb."""
    match choices:
        case Serve(config=config):
            mine = config.frontend == FrontendConfig()
            parallel = config.parallel
        case Generate(engine=engine):
            mine, parallel = bool(prompts), engine.parallel
        case Chat(engine=engine):
            mine, parallel = True, engine.parallel
        case _:
            return False
    return (
        mine
        and parallel.world_size == parallel.nodes == 1
        and parallel.distributed_backend is DistributedBackend.MP
    )


def _verb(choices: Struct, prompts: list[str], ahead: Ahead | None) -> Callable[[], int]:
    """Return the verb that runs `choices`, importing no other."""
    match choices:
        case Serve():
            from drumline.cli.serve import serve  # noqa: PLC0415

            return lambda: serve(choices, ahead)
        case Generate():
            from drumline.cli.generate import generate  # noqa: PLC0415

            return lambda: generate(choices, prompts, ahead)
        case Profile():
            from drumline.cli.profile import profile  # noqa: PLC0415

            return lambda: profile(choices, prompts)
        case Bench():
            from drumline.cli.bench import bench  # noqa: PLC0415

            return lambda: bench(choices, prompts)
        case Chat():
            from drumline.cli.chat import chat  # noqa: PLC0415

            return lambda: chat(choices, ahead)
        case _:
            raise TypeError(type(choices).__name__)


def _overview() -> str:
    lines = ["usage: drumline VERB …", ""]
    about = {verb: (kind.__doc__ or "").strip() for verb, (kind, _) in _VERBS.items()} | _PLAIN
    lines += [f"  {verb:<10}{text}" for verb, text in about.items()]
    return "\n".join([*lines, "", "`drumline VERB --help` lists a verb's flags."])


if __name__ == "__main__":
    sys.exit(main())
