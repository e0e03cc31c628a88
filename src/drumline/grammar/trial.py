"""One worker process as its owner sees it: grammars in, whether they compile in time out."""

import subprocess
import sys

from drumline.core.config import GrammarBackend
from drumline.core.errors import PeerError
from drumline.grammar.bounds import RefusedGrammarError
from drumline.grammar.link import Answer, Link, Setting
from drumline.grammar.prepare import Prepared
from drumline.grammar.vocabulary import Vocabulary

START_S = 120.0
"""How long a worker may take to load its library on a busy machine."""


class CompileTimeoutError(Exception):
    """A grammar did not compile in time; its worker was killed."""


class Trial:
    """Tries grammars in a process that is started when it is needed, and killed when it hangs.

    Thread: one at a time, but for `stop`.
    """

    __slots__ = ("_backend", "_link", "_process", "_ready", "_timeout_s", "_vocabulary")

    def __init__(self, backend: GrammarBackend, vocabulary: Vocabulary, timeout_s: float) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Have a worker, which may still be loading. Raises PeerError when none comes up."""
        if self._process is not None and self._process.poll() is None:
            return
        self.kill()
        process = subprocess.Popen(
            [sys.executable, "-m", "drumline.grammar.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._link = Link(process.stdout.fileno(), process.stdin.fileno())
        vocabulary = self._vocabulary
        try:
            self._link.send(Setting(self._backend, vocabulary.pieces, vocabulary.stop_ids))
        except PeerError as error:
            self.kill()
            raise PeerError(f"a grammar worker did not start: {error}") from None

    def attempt(self, prepared: Prepared) -> None:
        """Return if a grammar compiles in time, in the worker that `start` left.

        Its time begins when the worker is ready. Raises RefusedGrammarError when it never
        compiles, CompileTimeoutError when it takes too long, PeerError when the worker ends
        over it. After the last two there is no worker.
        """
        link = self._link
        if link is None:
            raise PeerError("there is no grammar worker")
        try:
            if not self._ready and link.receive(START_S) is None:
                raise PeerError(f"it was not ready after {START_S:.0f} s")
            self._ready = True
            link.send(prepared)
            answer = link.receive(self._timeout_s)
        except PeerError as error:
            self.kill()
            raise PeerError(f"the process that compiled it ended: {error}") from None
        if answer is None:
            self.kill()
            raise CompileTimeoutError
        if isinstance(answer, Answer) and answer.refused is not None:
            raise RefusedGrammarError(answer.refused)

    def stop(self) -> None:
        """End what the worker does, which whoever waits for it is told. Thread: any."""
        process = self._process
        if process is not None:
            process.kill()

    def kill(self) -> None:
        """End the worker, whatever it does, and close its pipes."""
        process, self._process = self._process, None
        self._link, self._ready = None, False
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
