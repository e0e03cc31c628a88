"""`python -m drumline.rank`: one rank's process, from settings to exit status.

It ends without finalizing the interpreter: a thread that hangs in a library must not
keep a rank alive that its launcher believes dead.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable

import setproctitle

from drumline.contract.layout import Layout
from drumline.contract.startup import AHEAD, EXIT_FAILED, EXIT_OPERATOR, RankSettings
from drumline.core.config import LogLevel
from drumline.core.errors import ConfigError, PeerError
from drumline.core.lifeline import die_with
from drumline.core.log import configure
from drumline.rank.heap import freeze_modules, suspend_collections
from drumline.rank.lifeline import Reports, read_settings, watch_launcher

_log = logging.getLogger("drumline.rank")


def main() -> int:
    """Run one rank until it is told to stop; return the exit status."""
    suspend_collections()
    ahead = len(sys.argv) > 1 and sys.argv[1] == AHEAD
    if ahead:
        die_with(int(sys.argv[2]))
        _load()
    try:
        settings = read_settings()
    except ConfigError as error:
        if not ahead:  # else its launcher found that there is nothing to serve
            sys.stderr.write(f"drumline.rank: {error}\n")
        return EXIT_OPERATOR
    layout = Layout.of(settings.config.parallel)
    setproctitle.setproctitle(f"drumline::{layout.name(settings.rank)}")
    die_with(settings.launcher_pid)
    stop = threading.Event()
    watch_launcher(stop.set)
    level = settings.config.process.log_level or LogLevel.INFO
    if level is LogLevel.INFO and not layout.leads(settings.rank):
        level = LogLevel.WARNING  # its replica's first member says the same
    configure(f"rank{settings.rank}", level)
    reports = Reports(settings.report_fd)
    try:
        reports.begin("imports")
        serve = _load()
        serve(settings, reports, stop)
    except ConfigError as error:
        _log.debug("refused to start", exc_info=True)
        reports.failed(error, EXIT_OPERATOR)
        return EXIT_OPERATOR
    except PeerError as error:
        # Its traceback would only say where this rank was when another one went.
        _log.error("the rank stops at %r: %s", reports.step, error)
        reports.failed(error, EXIT_FAILED)
        return EXIT_FAILED
    except BaseException as error:
        _log.critical("the rank stops at %r", reports.step, exc_info=True)
        reports.failed(error, EXIT_FAILED)
        return EXIT_FAILED
    return 0


def _load() -> Callable[[RankSettings, Reports, threading.Event], None]:
    """Load what serves: seconds of torch, for which the launcher must know of us before."""
    from drumline.rank.wiring import serve  # noqa: PLC0415

    freeze_modules()
    return serve


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)
