"""A prefill and a decode engine's plans, as the published C++ scheduler makes them.

One random stream drives both. Theirs frees an aborted request's blocks at once, ours when
its transfer has ended, which the stream says at the same time; theirs receives a prompt a
plan, so no two wait. docs/scheduler.md has the list.
"""

import os
import random

import pytest

from drumline.contract.specs import AttentionKind, CacheGroup
from drumline.core.config import Role
from drumline.scheduler.events import Aborted, Bootstrapped, Finished, RemoteFailed
from drumline.scheduler.lifecycle import State

pytest.importorskip(
    "tokenspeed_scheduler",
    reason="tokenspeed-scheduler is not installed (CPython 3.11 on x86-64 Linux only)",
)

from peer_rig import PeerRig
from published import Published
from scheduler_rig import sampled

LIVES = int(os.environ.get("DRUMLINE_SOAK_LIVES", "1"))
EVENTS = 300
FULL = CacheGroup(group_id="full", block_tokens=4)
HALVES = CacheGroup(group_id="halves", block_tokens=2)
WINDOW = CacheGroup(
    group_id="window", kind=AttentionKind.SLIDING_WINDOW, block_tokens=4, window_tokens=6
)


class RolePair:
    """Both schedulers in one role, and peers that treat them alike."""

    def __init__(self, role: Role, seed: int, **changes) -> None:
        self.random = random.Random(seed)
        self.role = role
        self.ours = PeerRig(
            role, num_pages=900, share_in_flight=False, promote_windows=False, **changes
        )
        self.theirs = Published(self.ours.rig.config)
        self.live: list[str] = []
        self.number = 0
        self.sent = 0
        self.story: list[object] = []

    def state(self, rid: str) -> State:
        return self.ours.scheduler._requests.get(rid).state

    def some(self, *states: State) -> str | None:
        """One of the live requests in any of `states`."""
        rids = [rid for rid in self.live if not states or self.state(rid) in states]
        return self.random.choice(rids) if rids else None

    def step(self) -> None:
        roll = self.random.random()
        waiting = self.some(State.BOOTSTRAPPING, State.SUBMITTED)
        if roll < 0.2 and (self.role is Role.PREFILL or waiting is None):
            self.submit()
        elif roll < 0.4:
            self.bootstrap()
        elif roll < 0.55:
            self.transfer()
        elif roll < 0.6:
            self.end()
        else:
            self.round()

    def submit(self) -> None:
        rid = f"r{self.number}"
        self.number += 1
        head, length = self.random.randint(0, 2) * 100, self.random.randint(1, 30)
        tokens = [*range(head, head + length), *[900 + self.random.randint(0, 3)] * (length % 3)]
        budget = self.random.choice([0, 0, 5]) if len(self.ours.rig.config.groups) == 1 else 0
        self.story.append(("submit", rid, tokens[0], len(tokens), budget))
        assert self.ours.submit(rid, tokens, max_new_tokens=budget) is None
        assert self.theirs.submit(rid, tokens, budget)
        self.live.append(rid)

    def bootstrap(self) -> None:
        rid = self.some(State.BOOTSTRAPPING)
        if rid is not None:
            self.story.append(("bootstrapped", rid))
            self.ours.tell(Bootstrapped(rid))
            self.theirs.bootstrapped(rid)

    def transfer(self) -> None:
        rid = self.some(State.HANDING_OVER, State.RECEIVING)
        if rid is None:
            return
        if self.role is Role.PREFILL and rid in self.ours.going:
            self.story.append(("succeeded", rid))
            self.live.remove(rid)
            self.ours.succeed(rid)
            self.theirs.succeeded(rid)
        elif self.role is Role.DECODE:
            self.story.append(("arrived", rid))
            token = int(sampled(self.ours.coming[rid].prompt_tokens))
            self.ours.arrive(rid)
            self.theirs.remote_prefilled(rid, token)

    def end(self) -> None:
        rid = self.some()
        if rid is None:
            return
        self.live.remove(rid)
        finish = self.state(rid) in (State.PREFILLED, State.DECODING)
        failed = not finish and self.random.random() < 0.5
        self.story.append(("finish" if finish else "fail" if failed else "abort", rid))
        if finish:
            self.ours.tell(Finished(rid))
            self.theirs.finish(rid)
        elif failed:
            self.ours.fail(rid)
            self.theirs.failed(rid)
        else:
            self.ours.tell(Aborted(rid), RemoteFailed(rid))
            self.ours.coming.pop(rid, None)
            self.ours.going.pop(rid, None)
            self.theirs.abort(rid)

    def round(self) -> None:
        ours, theirs = self.ours.plan(), self.theirs.plan()
        batch = theirs.forward[0]
        rids = self.ours.rig.rids(ours)
        self.story.append((rids, list(batch.request_ids), ours.remote_prefills))
        assert rids == list(batch.request_ids), "another batch"
        if rids:
            mine = ours.batch
            assert mine.rows.tolist() == list(batch.request_pool_indices), "other rows"
            assert mine.input_lengths.tolist() == list(batch.input_lengths), "other lengths"
            hits = mine.prefix_lengths[: mine.extends].tolist()
            assert hits == list(batch.extend_prefix_lens), "other prefixes"
            fed = [-1] * (len(rids) - mine.extends) if mine.decode_ids is None else mine.decode_ids
            assert list(fed) == list(batch.decode_input_ids), "other first tokens"
        self.compare_streams(ours.remote_prefills, theirs.remote_prefill)
        self.compare_streams(ours.remote_decodes, theirs.remote_decode)
        if ours.remote_prefills:
            cached = [one.cached_tokens for one in ours.remote_prefills]
            # Theirs also takes what is cached of a partial page, which peers do not.
            others = [tokens // 4 * 4 for tokens in theirs.remote_prefill.extend_prefix_lens]
            assert cached == others, "other prefixes sent"
        if ours.remote_decodes:
            tokens = [one.token for one in ours.remote_decodes]
            assert tokens == list(theirs.remote_decode.decode_input_ids), "other tokens sent"
        while self.ours.rig.in_flight:
            results = self.ours.rig.results()
            self.ours.scheduler.advance([results])
            tokens = iter(results.tokens.tolist())
            self.theirs.commit(
                [self.ours.rig.bound[row] for row in results.rows.tolist()],
                [[next(tokens) for _ in range(count)] for count in results.counts.tolist()],
            )

    def compare_streams(self, ours, theirs) -> None:
        others = [] if theirs is None else list(theirs.request_ids)
        self.sent += len(others)
        assert [one.rid for one in ours] == others, "other transfers"
        assert [one.row for one in ours] == ([] if theirs is None else theirs.request_pool_indices)
        for index, group in enumerate(self.ours.rig.config.groups):
            for at, one in enumerate(ours):
                pages = [page for page in theirs.block_tables[group.group_id][at] if page >= 0]
                mine = one.tables[index].tolist()
                if self.role is Role.PREFILL:
                    pages = pages[: len(mine)]  # theirs has room for a decode
                assert len(mine) == len(pages), "other tables"
                # Of a window, each holds some that nobody looks back on any more: theirs what
                # it found of a prompt that is received, ours what a prompt's last chunk read.
                held, other = (mine, pages) if self.role is Role.DECODE else (pages, mine)
                both = [page for own, page in zip(held, other, strict=True) if own]
                assert all(both), "other tables"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"max_scheduled_tokens": 12},
        {"groups": (HALVES,)},
        {"groups": (FULL, WINDOW)},
        {"prefix_caching": False},
    ],
    ids=["full", "chunks", "halves", "window", "no cache"],
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_transfers_are_planned_alike(role, shape, seed):
    for life in range(LIVES):
        pair = RolePair(role, seed + 1000 * life, **shape)
        for _ in range(EVENTS):
            try:
                pair.step()
            except AssertionError as error:
                error.add_note("\n".join(map(str, pair.story[-12:])))
                raise
        assert pair.sent > EVENTS / 50
