"""What storage is asked for, and what comes of its answers, as by the published C++ scheduler.

One random stream drives both: prompts, ticks, pressure, late and partial answers, aborts.
Prompts have a token more than full pages, as ours asks for no partial ones; and what is
known to be stored is taken out of what theirs stores again. docs/scheduler.md has the list.
"""

import os
import random
from collections import Counter

import pytest

from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.contract.storage import (
    StorageCancel,
    StorageGet,
    StorageKey,
    StoragePressure,
    StoragePut,
    StorageQuery,
)
from drumline.scheduler.lifecycle import State

pytest.importorskip(
    "tokenspeed_scheduler",
    reason="tokenspeed-scheduler is not installed (CPython 3.11 on x86-64 Linux only)",
)

from published import Published, storage_ops
from storage_rig import StorageRig, limits

LIVES = int(os.environ.get("DRUMLINE_SOAK_LIVES", "1"))
EVENTS = 300
"""Both start anew behind so many: near capacity they differ on purpose."""
NAMES = {StorageQuery: "query", StorageGet: "get", StoragePut: "put", StorageCancel: "cancel"}
FULL = CacheGroup(group_id="full", block_tokens=4)
HALVES = CacheGroup(group_id="halves", block_tokens=2)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)


class PartialPageAwaitedError(Exception):
    """Theirs waits on for a partial page, of a prompt whose full ones somebody else computed."""


class StoragePair:
    """Both schedulers, and the one storage that answers both."""

    def __init__(self, seed: int, groups, *, calm: bool, **few) -> None:
        """In `calm`, storage is always allowed and never behind, and stores are compared too:
        theirs drops what it may not store at once, ours keeps it until it may."""
        self.calm = calm
        self.random = random.Random(seed)
        self.ours = StorageRig(
            limits(max_operations=40, max_host_blocks=300, max_known_objects=10_000, **few),
            groups=groups,
            num_pages=600,
            num_host_pages=600,
            share_in_flight=False,
            promote_windows=False,
        )
        self.theirs = Published(self.ours.rig.config)
        self.ids: dict[int, int] = {}
        """Of ours, the id that theirs has."""
        self.live: list[str] = []
        self.number = 0
        self.keys_of_theirs: dict[int, list[StorageKey]] = {}
        self.pages: set[bytes] = set()
        """The digests of full pages of prompts."""
        self.seen: Counter[str] = Counter()
        self.story: list[object] = []
        self.allowed = self.missed = False
        self.tick()

    def tick(self) -> None:
        after = self.random.choice([0, 1, 100, 400])
        forward, storage = self.random.random() < 0.85, self.random.random() < 0.85
        queued = self.random.choice([0, 0, 0, 5, 11])
        if self.calm:
            storage, queued = True, 0
        # Theirs has who missed something wait on until storage is allowed; ours goes ahead.
        self.allowed = storage = storage or self.missed
        pressure = StoragePressure(queued, 0, 0)
        self.story.append(("tick", after, forward, storage, pressure.queued_operations))
        self.ours.tick(after, forward=forward, storage=storage, pressure=pressure)
        self.theirs.tick(self.ours.now_us, forward, storage, pressure)

    def step(self) -> None:
        roll = self.random.random()
        if roll < 0.2:
            self.submit()
        elif roll < 0.3:
            self.tick()
            self.round()  # one tick a round
        elif roll < 0.5 and self.ours.open:
            self.answer()
        elif roll < 0.55 and self.live:
            self.end()
        elif roll < 0.57 and self.live:
            rid = self.random.choice(self.live)
            self.story.append(("detach", rid))
            self.ours.detach(rid)
            self.theirs.detach(rid)
        elif roll < 0.6:
            self.forget()
        else:
            self.round()

    def submit(self) -> None:
        rid = f"r{self.number}"
        self.number += 1
        head = self.random.randint(0, 2) * 100
        tokens = list(range(head, head + 4 * self.random.randint(1, 8) + 1))
        self.story.append(("submit", rid, tokens[0], len(tokens)))
        assert self.ours.rig.submit(rid, tokens) is None
        assert self.theirs.submit(rid, tokens, 0)
        self.pages.update(self.ours.scheduler._requests.get(rid).digests)
        self.live.append(rid)

    def end(self) -> None:
        rid = self.random.choice(self.live)
        state = self.ours.scheduler._requests.get(rid).state
        finish = state in (State.PREFILLED, State.DECODING)
        self.story.append(("finish" if finish else "abort", rid))
        (self.ours.rig.finish if finish else self.ours.rig.abort)(rid)
        (self.theirs.finish if finish else self.theirs.abort)(rid)
        self.live.remove(rid)

    def forget(self) -> None:
        """Clear what is cached, where both may and nobody runs whose pages would be missed."""
        for rid in list(self.live):
            if self.ours.scheduler._requests.get(rid).state is not State.SUBMITTED:
                return
        if self.ours.scheduler.can_clear() and self.theirs.scheduler.can_clear_cache():
            self.story.append("clear")
            self.seen["clear"] += 1
            assert self.ours.scheduler.clear()
            self.theirs.scheduler.clear_cache()

    def answer(self) -> None:
        op_id = self.random.choice(list(self.ours.open))
        op = self.ours.open[op_id]
        success = [isinstance(op, StoragePut) or key in self.ours.objects for key in op.keys]
        if isinstance(op, StorageGet) and self.random.random() < 0.2:
            # Theirs drops what it read behind a gap; ours keeps it.
            end = self.random.randrange(len(op.keys))
            success = [one and at < end for at, one in enumerate(success)]
        if not all(success):
            if not self.allowed:
                return
            self.missed = True
        theirs = self.keys_of_theirs[self.ids[op_id]]
        by_key = dict(zip(op.keys, success, strict=True))
        self.story.append(("answer", op_id, success))
        self.ours.answer(op_id, success)
        answers = [by_key.get(key, isinstance(op, StoragePut)) for key in theirs]
        self.theirs.answer(self.ids.pop(op_id), answers, [False] * len(theirs))

    def round(self) -> None:
        known = self.ours.scheduler._storage._known
        stored = {key for key, fact in known._stored.items() if fact}
        ours, theirs = self.ours.plan(), self.theirs.plan()
        self.compare_storage(ours, theirs, stored)
        self.missed = False
        batch = theirs.forward[0] if theirs.forward else None
        rids = self.ours.rig.rids(ours)
        self.story.append(("round", rids, ours.storage_ops))
        assert rids == (list(batch.request_ids) if batch else []), "another batch"
        if rids:
            hits = ours.batch.prefix_lengths[: ours.batch.extends].tolist()
            assert hits == list(batch.extend_prefix_lens), "other prefixes"
        for op in self.ours.rig.unacknowledged:
            self.seen[type(op).__name__] += 1
        while self.ours.rig.unacknowledged:
            self.ours.rig.acknowledge()
        self.theirs.acknowledge(theirs)
        while self.ours.rig.in_flight:
            results = self.ours.rig.results()
            self.ours.scheduler.advance([results])
            tokens = iter(results.tokens.tolist())
            self.theirs.commit(
                [self.ours.rig.bound[row] for row in results.rows.tolist()],
                [[next(tokens) for _ in range(count)] for count in results.counts.tolist()],
            )

    def compare_storage(self, ours, theirs, stored) -> None:
        mine = [(NAMES[type(op)], op) for op in ours.storage_ops]
        if not self.calm:
            for _, op in [one for one in mine if one[0] == "put"]:
                self.ours.answer(op.op_id)
            mine = [one for one in mine if one[0] != "put"]
        others = []
        for kind, op_id, keys in storage_ops(theirs):
            named = [StorageKey(group, bytes.fromhex(hexed), part) for group, hexed, part in keys]
            if kind == "cancel":
                # Theirs also says so of what is answered by then.
                if op_id in self.ids.values():
                    others.append((kind, op_id, named))
                continue
            self.keys_of_theirs[op_id] = named
            if kind == "put":
                if not self.calm:
                    self.theirs.answer(op_id, [True] * len(keys), [False] * len(keys))
                    continue
                named = [key for key in named if key not in stored and self.full(key)]
                if not named:
                    self.theirs.answer(op_id, [True] * len(keys), [False] * len(keys))
                    continue
            if kind == "query":
                named = [key for key in named if key.digest in self.pages]
            others.append((kind, op_id, named))
        ended = {self.ids[op.op_id] for kind, op in mine if kind == "cancel"}
        for op_id in ended - {op_id for kind, op_id, _ in others if kind == "cancel"}:
            if any(key.digest not in self.pages for key in self.keys_of_theirs[op_id]):
                raise PartialPageAwaitedError
        assert sorted(kind for kind, _ in mine) == sorted(kind for kind, *_ in others), (
            f"other operations: {mine} against {others}"
        )
        for kind, op in mine:
            self.seen[kind] += 1
            if isinstance(op, StorageCancel):
                match = next(one for one in others if one[1] == self.ids[op.op_id])
            else:
                wanted = set(op.keys)
                match = next((o for o in others if o[0] == kind and set(o[2]) == wanted), None)
                assert match is not None, f"{op} has other keys: {others}"
                self.ids[op.op_id] = match[1]
            others.remove(match)

    def full(self, key: StorageKey) -> bool:
        """Whether a key is of a page that ours keeps in storage, not of a partial one."""
        index = self.ours.scheduler._host.index
        node = index.find(key.digest)
        return node > 0 and index.end[node] % index.page_tokens == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("groups", "calm", "few"),
    [
        ((FULL,), True, {}),
        ((FULL,), False, {}),
        ((FULL,), False, {"max_keys_per_operation": 3, "min_prefetch_tokens": 8}),
        ((FULL,), False, {"max_prefetch_tokens": 12}),
        ((HALVES,), True, {}),
        ((FULL, WINDOW), False, {}),
    ],
    ids=["calm", "troubled", "few keys", "few tokens", "halves", "window"],
)
def test_storage_is_used_alike(groups, few, seed, calm):
    cut_short = 0
    for life in range(LIVES):
        pair = StoragePair(seed + 1000 * life, groups, calm=calm, **few)
        for _ in range(EVENTS):
            try:
                pair.step()
            except PartialPageAwaitedError:
                cut_short += 1
                break
            except AssertionError as error:
                error.add_note("\n".join(map(str, pair.story[-12:])))
                raise
        assert pair.seen["query"] > 0
    assert cut_short <= 1 + LIVES // 4
