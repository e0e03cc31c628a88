"""`drumline generate`: one prompt, one answer."""

import sys

import msgspec

from drumline.cli.engine import conversation, sampling, started
from drumline.cli.progress import Progress
from drumline.cli.verbs import Generate
from drumline.core.errors import ConfigError
from drumline.launcher.rank_process import Ahead


def generate(choices: Generate, words: list[str], ahead: Ahead | None = None) -> int:
    """Answer the prompt in `words` (`-` is standard input); return the exit status."""
    prompt = _prompt(words)
    progress = Progress()
    params = sampling(choices.sampling)
    with started(choices.engine, progress, ahead) as llm:
        if llm.embedded:
            progress.note(f"no model was named: this is the embedded {llm.model}")
        progress.at("reading the prompt")
        if choices.output.raw:
            outputs = llm.stream_generate(prompt, params)
        else:
            messages = [*conversation(choices.sampling), {"role": "user", "content": prompt}]
            outputs = llm.stream_chat(messages, params)
        shown = 0
        last = None
        for last in outputs:
            progress.done()
            if not choices.output.json:
                print(last.outputs[0].text[shown:], end="", flush=True)
                shown = len(last.outputs[0].text)
        progress.done()
        if choices.output.json and last is not None:
            print(msgspec.json.encode(last).decode())
        else:
            print()
    return 0


def _prompt(words: list[str]) -> str:
    if not words:
        raise ConfigError("PROMPT", "there is none; give it as a word, or - for standard input")
    if words == ["-"]:
        return sys.stdin.read().removesuffix("\n")
    return " ".join(words)
