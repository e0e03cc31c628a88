"""A scheduler that runs for ever keeps what it needs now, and nothing else."""

import os
import tracemalloc

import numpy as np
from scheduler_rig import config, results_of, spec

from drumline.scheduler.events import Finished
from drumline.scheduler.scheduler import Scheduler

ROUNDS = int(os.environ.get("DRUMLINE_SOAK_ROUNDS", "3000"))


def test_memory_is_flat_under_churn():
    scheduler = Scheduler(config(num_pages=200, max_rows=8))
    rng = np.random.default_rng(0)
    live: list[tuple[str, int]] = []
    submitted = 0

    def run(rounds: int) -> None:
        nonlocal submitted
        for number in range(rounds):
            if len(live) < 10:
                head = [int(rng.integers(4))] * 12
                tokens = [*head, *rng.integers(0, 99, int(rng.integers(1, 20))).tolist()]
                assert scheduler.submit([spec(f"r{submitted}", tokens)]) is None
                live.append((f"r{submitted}", int(rng.integers(5, 60))))
                submitted += 1
            plan = scheduler.plan()
            if plan.batch is not None:
                scheduler.advance([results_of(plan.batch)])
            if number % 4 == 3:
                rid, _budget = live[0]
                if scheduler.token_size(rid) > 30:
                    scheduler.advance([Finished(rid)])
                    live.pop(0)

    run(ROUNDS // 2)
    tracemalloc.start()
    run(ROUNDS // 4)
    before = tracemalloc.get_traced_memory()[0]
    run(ROUNDS // 4)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    scheduler.check()
    assert submitted > ROUNDS // 20
    assert grown < 128 * 1024, f"{grown} bytes more after {ROUNDS // 4} rounds"
