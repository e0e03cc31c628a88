"""One rank of a mesh as a process: it gathers in a loop until something ends it.

Run with its seat and settings as JSON, and the seconds it sleeps before each round. It says
`ready`, every twentieth round, and how it ended.
"""

import logging
import sys
import time

import msgspec

from drumline.collective.mesh import join
from drumline.collective.settings import MeshSettings, Seat
from drumline.core.clock import SystemClock
from drumline.core.errors import DrumlineError


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log %(message)s")
    seat = msgspec.json.decode(sys.argv[1], type=Seat)
    settings = msgspec.json.decode(sys.argv[2], type=MeshSettings)
    pause_s = float(sys.argv[3])
    mesh = join(seat, settings, SystemClock())
    group = mesh.group(range(seat.size), "replica")
    group.all_gather(b"")
    say("ready")
    number = 0
    try:
        while True:
            time.sleep(pause_s)
            assert group.all_gather_ints([number]) == [[number]] * seat.size
            number += 1
            if number % 20 == 0:
                say(f"round {number}")
    except DrumlineError as error:
        say(f"ended {type(error).__name__} {error}")
    mesh.close()


if __name__ == "__main__":
    main()
