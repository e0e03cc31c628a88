"""A stand-in for a rank's process: it speaks the launcher's side channel and obeys a script.

Each argument is a step: `step:NAME`, `ready`, `fail:CODE:SETTING:REASON`, `exit:CODE`,
`kill`, `silent` (close the pipe), `deaf` (ignore SIGTERM), `sleep:S`, `serve`,
and `step-if:RANK`, `ready-if:RANK`, `serve-if:RANK`, `kill-if:RANK`, `peer-gone` (fail
because another rank ended; `peer-gone-if:RANK` exits then, too), and
`meeting` (report later where the ranks meet).
"""

import os
import signal
import sys
import threading
import time

from drumline.contract.startup import Failed, Ready, Step, encode_report
from drumline.rank.lifeline import read_settings, watch_launcher

settings = read_settings()
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
watch_launcher(stop.set)


def report(message):
    os.write(settings.report_fd, encode_report(message))


def summary():
    return met or f"rank {settings.rank} of {settings.handshake}"


met = ""
for word in sys.argv[1:]:
    verb, _, rest = word.partition(":")
    match verb:
        case "step":
            report(Step(rest))
        case "ready":
            report(Ready(summary()))
        case "meeting":
            place = settings.meeting
            met = f"{place.address} {place.token} {'listens' if place.listener_fd else 'dials'}"
        case "step-if" if settings.rank == int(rest):
            report(Step("further"))
        case "kill-if" if settings.rank == int(rest):
            os.kill(os.getpid(), signal.SIGKILL)
        case "peer-gone":
            report(Failed("serving", "PeerError: rank 1 ended", 1, of_peer=True))
        case "peer-gone-if" if settings.rank == int(rest):
            report(Failed("serving", "PeerError: rank 1 ended", 1, of_peer=True))
            os._exit(1)
        case "ready-if" if settings.rank == int(rest):
            report(Ready(""))
        case "serve-if" if settings.rank == int(rest):
            stop.wait(30)
        case "fail":
            code, setting, reason = rest.split(":")
            report(Failed("weights", reason, int(code), setting))
        case "exit":
            os._exit(int(rest))
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "silent":
            os.close(settings.report_fd)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        case "sleep":
            time.sleep(float(rest))
        case "serve":
            stop.wait(30)
