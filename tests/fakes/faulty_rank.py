"""A rank's process with a fault in one of the ranks: `faulty_rank.py FAULT RANK`.

Tests start it in place of `python -m drumline.rank`; no setting leads here.

    flips    plans another row than it should, in one batch, and says `flipped in round N`
    breaks   raises while it loads the model
    is-poor  finds no memory for its KV pool
"""

import itertools
import runpy
import sys

from drumline.device import budget
from drumline.rank import wiring
from tests.fakes.flipping import Flipping

FAULT, RANK = sys.argv[1], int(sys.argv[2])
GOOD_BATCHES = 20


def flips(scheduler):
    """Return the scheduler, to go astray after some batches."""
    batches = itertools.count()

    def due(plan):
        if next(batches) < GOOD_BATCHES:
            return False
        sys.stderr.write(f"flipped in round {plan.round}\n")
        return True

    return Flipping(scheduler, due)


def breaks(*_):
    raise RuntimeError("a planted fault")


serve, event_loop = wiring.serve, wiring.EventLoop


def faulty(settings, reports, stop):
    """Serve, with the fault where it belongs."""
    if settings.rank == RANK:
        match FAULT:
            case "flips":
                wiring.EventLoop = lambda *, scheduler, **rest: event_loop(
                    scheduler=flips(scheduler), **rest
                )
            case "breaks":
                wiring.build = breaks
            case "is-poor":
                budget.available_bytes = lambda: 1 << 20
    serve(settings, reports, stop)


wiring.serve = faulty
runpy.run_module("drumline.rank", run_name="__main__", alter_sys=True)
