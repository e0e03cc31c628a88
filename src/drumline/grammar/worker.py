"""A process that tries grammars: `python -m drumline.grammar.worker`, started by the pool.

A compile cannot be cancelled, but a process can be killed. What compiled here in time
is known to end, and is compiled once more where it is used: that costs less than moving
a compiled grammar from here to there.
"""

import contextlib
import os
import resource
import signal
import threading

import psutil

from drumline.core.errors import InvariantError, PeerError
from drumline.grammar.backends import Backend, open_backend
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.link import Answer, Link, Setting
from drumline.grammar.prepare import Prepared
from drumline.grammar.spelling import Spelling
from drumline.grammar.vocabulary import Vocabulary

MEMORY_BYTES = 2 << 30
"""What a compile may take beside the loaded libraries; a process beyond it ends."""

NICE = 5


def main() -> None:
    """Answer what comes over standard input until it ends."""
    # An interrupt at a terminal is the owner's to answer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Rounds and forwards come first where processors are short.
    os.nice(NICE)
    # What a library prints must not mix with the answers.
    sending = os.dup(1)
    os.dup2(2, 1)
    link = Link(0, sending)
    setting = link.receive()
    if not isinstance(setting, Setting):
        raise InvariantError(f"a worker is told what it compiles for first, not {setting!r}")
    vocabulary = Vocabulary(setting.pieces, setting.stop_ids)
    backend, spelling = open_backend(setting.backend, vocabulary), Spelling(vocabulary)
    _limit_memory()
    with contextlib.suppress(PeerError):
        link.send(Answer())
        while isinstance(asked := link.receive(), Prepared):
            link.send(_tried(backend, spelling, asked))


def _tried(backend: Backend, spelling: Spelling, prepared: Prepared) -> Answer:
    try:
        spelling.check(prepared, backend.compile(prepared))
    except RefusedGrammarError as error:
        return Answer(str(error) or "the library gives no reason")
    return Answer()


def _limit_memory() -> None:
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone, even within a compile."""
    pause = threading.Event()
    while os.getppid() == parent:
        pause.wait(1.0)
    os._exit(1)


if __name__ == "__main__":
    main()
