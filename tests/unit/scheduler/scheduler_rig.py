"""A scheduler with the little of an engine that it needs: forwards that return tokens.

`Rig` keeps tables and pages of its own, changed by plans alone. A page's slot holds
what stands for a key and value there: a hash of all tokens up to it. Every forward
checks that each row reads, at every position before its own, what its own tokens
would have written. Sampled tokens depend on the position alone, so that they are known
before they are returned.

Copies that a device may carry out at any time until their acknowledgment are carried out
with it. A copy that fails leaves garbage, and so does a forward that reads some, which only
a prefix may do whose load is not known to have failed.
"""

import numpy as np

from drumline.contract.arrays import NO_INTS
from drumline.contract.cache import CacheAck, CacheOp, LoadBack, Restore, Snapshot, WriteBack
from drumline.contract.plan import Batch, Plan, decode_plan, encode_plan
from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.events import Aborted, Finished, RequestSpec, Results
from drumline.scheduler.scheduler import Scheduler

GARBAGE = "garbage"


def config(**changes) -> SchedulerConfig:
    """A small pool with pages of 4 tokens."""
    fields = {
        "groups": (CacheGroup(group_id="full", block_tokens=4),),
        "num_pages": 32,
        "prefix_granularity": 4,
        "max_rows": 8,
        "max_scheduled_tokens": 64,
    }
    return SchedulerConfig(**(fields | changes))


def spec(rid: str, tokens, **changes) -> RequestSpec:
    """A request for `tokens`: ids, or how many (then 0, 1, 2 …)."""
    ids = range(tokens) if isinstance(tokens, int) else tokens
    return RequestSpec(rid=rid, tokens=np.array(ids, np.int32), **changes)


class Rig:
    """One scheduler, its forwards in flight, and the device's tables."""

    def __init__(
        self, cfg: SchedulerConfig | None = None, *, check_every: int = 1, **changes
    ) -> None:
        """Have the scheduler prove every so many steps that it accounts for everything."""
        self.config = cfg or config(**changes)
        self.check_every = check_every
        self.steps = 0
        self.scheduler = Scheduler(self.config)
        self.tables = [
            np.zeros((self.config.max_rows + 1, 4096), np.int32) for _ in self.config.groups
        ]
        self.bound: dict[int, str] = {}
        self.names: dict[tuple[int, int], str] = {}
        self.memory: list[dict[tuple[int, int], int]] = [{} for _ in self.config.groups]
        self.snapshots: list[dict[tuple[int, int], int]] = [{} for _ in self.config.groups]
        self.host: list[dict[tuple[int, int], int]] = [{} for _ in self.config.groups]
        self.unacknowledged: list[CacheOp] = []
        self.loads_fail = False
        self.failed_loads: set[int] = set()
        self.histories: dict[str, list[int]] = {}
        self.prompts: dict[str, list[int]] = {}
        self.in_flight: list[Batch] = []
        self.plans: list[Plan] = []

    # -- what a test says ---------------------------------------------------------

    def submit(self, rid: str, tokens, **changes) -> str | None:
        return self.submit_all([spec(rid, tokens, **changes)])

    def submit_all(self, specs: list[RequestSpec]) -> str | None:
        reason = self.scheduler.submit(specs)
        if reason is None:
            self.prompts |= {one.rid: one.tokens.tolist() for one in specs}
            for one in specs:
                self.histories[one.rid] = []
        return reason

    def plan(self) -> Plan:
        """Plan a round, carry its patches out and put its forward in flight."""
        plan = decode_plan(encode_plan(self.scheduler.plan()))
        self._check()
        self.plans.append(plan)
        self._change_pages(plan)
        for patch in plan.patches:
            self.tables[patch.group][patch.rows, patch.columns] = patch.blocks
        for bound in plan.bound:
            self.bound[bound.row] = bound.rid
            self.names[bound.row, bound.generation] = bound.rid
        if plan.batch is not None:
            self._read(plan.batch)
            self.in_flight.append(plan.batch)
        return plan

    def commit(self, count: int = 1) -> None:
        """Return the oldest forward's results, `count` tokens a decode row."""
        self.scheduler.advance([self.results(count)])
        self._check()

    def results(self, count: int = 1) -> Results:
        return results_of(self.in_flight.pop(0), count)

    def round(self, depth: int = 0) -> Plan:
        """Plan, and commit down to `depth` forwards in flight."""
        plan = self.plan()
        while len(self.in_flight) > (depth if plan.batch is not None else 0):
            self.commit()
        return plan

    def finish(self, *rids: str) -> None:
        self.scheduler.advance([Finished(rid) for rid in rids])
        self._check()

    def abort(self, *rids: str) -> None:
        self.scheduler.advance([Aborted(rid) for rid in rids])
        self._check()

    # -- what a test asks ---------------------------------------------------------

    def rids(self, plan: Plan) -> list[str]:
        """The requests of a plan's batch, in order."""
        return [] if plan.batch is None else [self.bound[row] for row in plan.batch.rows.tolist()]

    def row(self, rid: str) -> int:
        return next(row for row, name in reversed(self.bound.items()) if name == rid)

    def pages(self, rid: str, group: int = 0) -> list[int]:
        """The device's table row of a request, up to its last page."""
        return np.trim_zeros(self.tables[group][self.row(rid)], "b").tolist()

    def at_baseline(self) -> bool:
        """Whether no request holds anything."""
        return self.scheduler.active_pages() == 0

    def acknowledge(self, which: int = 0, *, ok: bool = True) -> None:
        """End one of the operations under way."""
        op = self.unacknowledged.pop(which)
        if isinstance(op, LoadBack):
            # Whether it failed showed in the plan's own forward.
            ok = op.op_id not in self.failed_loads
            self.failed_loads.discard(op.op_id)
        elif isinstance(op, WriteBack) and not ok:
            self._spoil(op.moves, self.host)
        elif isinstance(op, WriteBack) and op.pinned:
            self._move(op.moves, self.memory, self.host)
        self.scheduler.advance_head([CacheAck(op.op_id, ok)])
        self._check()

    def _check(self) -> None:
        self.steps += 1
        if self.steps % self.check_every == 0:
            self.scheduler.check()

    def _size(self, group: int) -> int:
        """What a block has slots for: tokens, or the one thing that a state group carries."""
        return self.config.groups[group].block_tokens or 1

    def _move(self, moves, sources, targets) -> None:
        for part in moves:
            size = self._size(part.group)
            for source, target in zip(part.sources.tolist(), part.targets.tolist(), strict=True):
                for slot in range(size):
                    targets[part.group][target, slot] = sources[part.group].get((source, slot))

    def _spoil(self, moves, targets) -> None:
        for part in moves:
            size = self._size(part.group)
            for target in part.targets.tolist():
                targets[part.group].update({(target, slot): GARBAGE for slot in range(size)})

    def _change_pages(self, plan: Plan) -> None:
        for op in plan.cache_ops:
            self.unacknowledged.append(op)
            if isinstance(op, WriteBack) and not op.pinned:
                self._move(op.moves, self.memory, self.host)
            if isinstance(op, Snapshot):
                self._move(op.moves, self.memory, self.snapshots)
        for copies in plan.copies:
            memory, size = self.memory[copies.group], self._size(copies.group)
            for source, target in zip(
                copies.sources.tolist(), copies.targets.tolist(), strict=True
            ):
                for slot in range(size):
                    memory[target, slot] = memory.get((source, slot), 0)
        for zeroes in plan.zeroes:
            memory, size = self.memory[zeroes.group], self._size(zeroes.group)
            for page in zeroes.blocks.tolist():
                for slot in range(size):
                    memory[page, slot] = 0
        for op in plan.cache_ops:
            if isinstance(op, LoadBack) and self.loads_fail:
                self.failed_loads.add(op.op_id)
                self._spoil(op.moves, self.memory)
            elif isinstance(op, LoadBack):
                self._move(op.moves, self.host, self.memory)
            elif isinstance(op, Restore):
                self._move(op.from_host, self.host, self.memory)
                self._move(op.from_snapshot, self.snapshots, self.memory)

    def _read(self, batch: Batch) -> None:
        if self.config.stages > 1:
            self._check_named(batch)
        for row, start, count in zip(
            batch.rows.tolist(),
            batch.prefix_lengths.tolist(),
            batch.input_lengths.tolist(),
            strict=True,
        ):
            for index, group in enumerate(self.config.groups):
                if group.kind is AttentionKind.STATE:
                    self._carry(index, row, start, count)
                else:
                    self._feed(index, group, row, start, count)

    def _check_named(self, batch: Batch) -> None:
        """Rows of a pipeline feed what the plan names, and no result of theirs is under way."""
        rows = batch.rows[batch.extends :]
        if len(rows) and self.config.decode_tokens == 1:
            fed = sampled(batch.prefix_lengths[batch.extends :])
            assert batch.decode_ids.tolist() == fed.tolist()
        owed = set(zip(rows.tolist(), batch.generations[batch.extends :].tolist(), strict=True))
        for earlier in self.in_flight:
            ends = earlier.prefix_lengths + earlier.input_lengths
            sampling = np.ones(earlier.size, np.bool_)
            sampling[: earlier.extends] = ends[: earlier.extends] == earlier.prompt_lengths
            pairs = zip(earlier.rows.tolist(), earlier.generations.tolist(), strict=True)
            under_way = {pair for pair, samples in zip(pairs, sampling, strict=True) if samples}
            assert under_way.isdisjoint(owed)

    def _feed(self, index: int, group: CacheGroup, row: int, start: int, count: int) -> None:
        size, table, memory = group.block_tokens, self.tables[index][row], self.memory[index]
        first = 0 if group.window_tokens is None else max(start + 1 - group.window_tokens, 0)
        assert (table[first // size : -(-(start + count) // size)] > 0).all(), "no block to read"
        history = self._history(self.bound[row], start + count)
        spoilt = False
        if self.config.decode_tokens == 1:
            for position in range(first, start):
                seen = memory.get((int(table[position // size]), position % size))
                if seen == GARBAGE:
                    assert self.failed_loads, f"position {position} is known to hold garbage"
                    spoilt = True
                else:
                    assert seen == history[position], f"position {position} was another's"
        for position in range(start, start + count):
            value = GARBAGE if spoilt else history[position]
            memory[int(table[position // size]), position % size] = value

    def _carry(self, index: int, row: int, start: int, count: int) -> None:
        """Read what is carried up to `start` and write what is behind `count` more tokens."""
        memory = self.memory[index]
        read, written = self.tables[index][row, :2].tolist()
        assert written > 0, "no block to write what is carried"
        history = self._history(self.bound[row], start + count)
        seen = memory.get((read or written, 0))
        if seen == GARBAGE:
            assert self.failed_loads, f"what is carried up to {start} is known to be garbage"
        elif self.config.decode_tokens == 1:
            assert seen == (history[start - 1] if start else 0), f"another carried up to {start}"
        memory[written, 0] = GARBAGE if seen == GARBAGE else history[start + count - 1]

    def _history(self, rid: str, tokens: int) -> list[int]:
        history, prompt = self.histories[rid], self.prompts[rid]
        for position in range(len(history), tokens):
            token = prompt[position] if position < len(prompt) else sampled(position)
            history.append(hash((history[-1] if history else 1, token)))
        return history


def sampled(position):
    """The token that is sampled for a position."""
    return position * 7 % 50


def results_of(batch: Batch, count: int = 1) -> Results:
    counts = np.full(batch.size, count, np.int32)
    ends = batch.prefix_lengths[: batch.extends] + batch.input_lengths[: batch.extends]
    counts[: batch.extends] = ends == batch.prompt_lengths
    positions = batch.prefix_lengths + batch.input_lengths
    tokens = np.repeat(sampled(positions), counts).astype(np.int32) if batch.size else NO_INTS
    return Results(rows=batch.rows, generations=batch.generations, counts=counts, tokens=tokens)
