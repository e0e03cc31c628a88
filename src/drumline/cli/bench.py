"""`drumline bench`: a load for a running server, and what its users would have seen."""

import asyncio
import math
import sys
from collections import Counter
from pathlib import Path

import msgspec
import uvloop

from drumline.bench.figures import summary, table
from drumline.bench.serving import measured
from drumline.cli.progress import Progress
from drumline.cli.verbs import Bench
from drumline.contract.startup import EXIT_FAILED
from drumline.core.errors import ConfigError, PeerError

_MOST_REASONS = 5


def bench(choices: Bench, words: list[str]) -> int:
    """Measure; return the exit status, which tells of failed requests."""
    if words:
        raise ConfigError("bench", f"there are only flags behind it; it is {words[0]!r}")
    file = choices.report.output_file
    if file is not None and not Path(file).absolute().parent.is_dir():
        raise ConfigError("--output-file", f"{file!r} is in no directory that there is")
    progress = Progress()
    progress.at(f"asking {choices.target.base_url}")
    count = choices.load.num_prompts
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            results = runner.run(
                measured(
                    choices.target,
                    choices.load,
                    lambda ended: progress.at(f"{ended} of {count} requests"),
                )
            )
    finally:
        progress.done()
    for reason, times in Counter(results.failures).most_common(_MOST_REASONS):
        print(f"failed, {times} of {count}: {reason}", file=sys.stderr)
    if not results.answers:
        raise PeerError(f"{choices.target.base_url}: no request was answered")
    figures = summary(results.answers)
    print(table(figures))
    if file is not None:
        asked = {"endpoint": choices.target.endpoint, "model": results.model}
        load = msgspec.to_builtins(choices.load)
        if math.isinf(choices.load.request_rate):
            load["request_rate"] = "inf"  # which JSON has no number for
        report = asked | load | {"failed": len(results.failures)} | figures
        Path(file).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    return EXIT_FAILED if results.failures else 0
