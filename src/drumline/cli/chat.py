"""`drumline chat`: a conversation on the terminal, answers as they are drawn."""

import contextlib
import sys
from collections.abc import Mapping

from drumline.cli.engine import conversation, sampling, started
from drumline.cli.progress import Progress
from drumline.cli.verbs import Chat
from drumline.core.errors import RequestError
from drumline.launcher.rank_process import Ahead
from drumline.offline.llm import LLM
from drumline.offline.sampling import SamplingParams

_HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer."


def chat(choices: Chat, ahead: Ahead | None = None) -> int:
    """Talk until the end of the input or /exit; return the exit status."""
    if sys.stdin.isatty():
        # Line editing and history; merely importing it gives them to input().
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, PLC0415

    params = sampling(choices.sampling)
    with started(choices.engine, Progress(), ahead) as llm:
        print(f"{llm.model}{' (embedded)' if llm.embedded else ''}. {_HELP}")
        _converse(llm, choices, params)
    return 0


def _converse(llm: LLM, choices: Chat, params: SamplingParams) -> None:
    messages = conversation(choices.sampling)
    while True:
        try:
            said = input("> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        match said:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                messages = conversation(choices.sampling)
                print("forgotten.")
                continue
            case "/help":
                print(_HELP)
                continue
        try:
            answer = _answered(llm, [*messages, {"role": "user", "content": said}], params)
        except RequestError as error:
            # Most often the conversation has outgrown the context; it is kept as it was.
            print(f"! {error} (/reset starts anew)")
            continue
        messages += [
            {"role": "user", "content": said},
            {"role": "assistant", "content": answer},
        ]


def _answered(llm: LLM, messages: list[Mapping[str, str]], params: SamplingParams) -> str:
    """Print an answer as it comes and return it; Ctrl-C keeps what there is of it."""
    text = ""
    with contextlib.closing(llm.stream_chat(messages, params)) as outputs:
        try:
            for output in outputs:
                print(output.outputs[0].text[len(text) :], end="", flush=True)
                text = output.outputs[0].text
        except KeyboardInterrupt:
            print(" …", end="")
    print()
    return text
