"""What ties a rank to its launcher: settings in, reports out, and no life without it.

The settings come over standard input, whose end later means that the launcher is
gone; then the rank is told to stop, and ended if it does not.
"""

import os
import threading
import time
from collections.abc import Callable

import msgspec

from drumline.contract.startup import (
    EXIT_FAILED,
    Failed,
    RankSettings,
    Ready,
    Report,
    Step,
    decode_settings,
    encode_report,
)
from drumline.core.errors import ConfigError, PeerError

ORPHAN_GRACE_S = 1.0
"""How long a rank without a launcher may take to stop by itself."""

_STDIN = 0


def read_settings() -> RankSettings:
    """Read this rank's settings from standard input. Raises ConfigError when there are none."""
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(_STDIN, 65536)
        if not chunk:
            break
        line += chunk
    try:
        return decode_settings(line)
    except msgspec.DecodeError as error:
        raise ConfigError(
            "standard input",
            f"no rank settings ({error}); ranks are started by the launcher, see `drumline serve`",
        ) from None


def watch_launcher(orphaned: Callable[[], None]) -> None:
    """Start the thread that waits for the launcher's end; it calls `orphaned`, then ends us.

    The kernel's own signal does not reach a rank whose launcher died through an
    intermediate process, and not every system has it; the pipe's end always comes.
    """

    def wait() -> None:
        while os.read(_STDIN, 4096):
            pass
        orphaned()
        time.sleep(ORPHAN_GRACE_S)
        os._exit(EXIT_FAILED)

    threading.Thread(target=wait, name="launcher-watch", daemon=True).start()


class Reports:
    """The pipe to the launcher."""

    __slots__ = ("_fd", "step")

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._fd = fd
        self.step = "launch"

    def begin(self, step: str) -> None:
        """Report that a part of the start-up begins."""
        self.step = step
        self._send(Step(step))

    def ready(self, summary: str) -> None:
        """Report that the rank serves."""
        self.step = "serving"
        self._send(Ready(summary))

    def failed(self, error: BaseException, exit_code: int) -> None:
        """Report why the rank ends."""
        if isinstance(error, ConfigError):
            setting, reason = error.setting, error.reason
        else:
            text = str(error).strip() or "no more is known"
            setting, reason = "", f"{type(error).__name__}: {text.splitlines()[0]}"
        of_peer = isinstance(error, PeerError)
        self._send(Failed(self.step, reason, exit_code, setting, of_peer))

    def lost(self, error: PeerError) -> None:
        """Report that the rank ends because another one did."""
        self.failed(error, EXIT_FAILED)

    def _send(self, report: Report) -> None:
        try:
            os.write(self._fd, encode_report(report))
        except BrokenPipeError:
            # The launcher is gone; the watch on standard input deals with that.
            return
