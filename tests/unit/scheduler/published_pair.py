"""The published scheduler and ours, fed one random stream of events; their plans must agree.

Pages are named differently, so tables are compared up to a renaming of pages; what is
shared in one must be shared in the other. What ours does otherwise on purpose is listed in
docs/scheduler.md: the stream stays away from most of it. The rest ends in different pages
being cached, or different numbers of pages being free: where plans differ and one of the
two was so before the plan, both start anew, and the reason is counted.
"""

import random
from collections import Counter

import numpy as np
from published import Published
from scheduler_rig import Rig, config, sampled

from drumline.contract.kv_events import BlockRemoved
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.lifecycle import State

GIVEN_UP = "other pages were given up"
LATER = "a page was offered earlier than by theirs"
PARTS = "parts of other pages were given up"
ROOM = "another number of pages is free"


class Pair:
    """Both schedulers, fed alike."""

    def __init__(self, seed: int, **changes) -> None:
        self.random = random.Random(seed)
        caching = changes.get("prefix_caching", True)
        self.config: SchedulerConfig = config(
            share_in_flight=False, promote_windows=False, kv_events=caching, **changes
        )
        self.number = 0
        self.restarts: Counter[str] = Counter()
        self.story: list[object] = []
        self.start()

    def start(self) -> None:
        """Begin with nothing cached and nobody running."""
        self.ours, self.theirs = Rig(self.config, check_every=8), Published(self.config)
        pool = self.ours.scheduler._pool
        pool._forget = self._noting_what_goes(pool._forget)
        self.evicted = False
        self.live: list[str] = []
        self.cached: set[int] = set()
        self.cached_by_theirs: set[int] = set()

    def _noting_what_goes(self, forget):
        def noted(group, blocks):
            self.evicted = True
            forget(group, blocks)

        return noted

    # -- the stream -----------------------------------------------------------------

    def step(self) -> None:
        roll = self.random.random()
        if roll < 0.2:
            self.submit()
        elif roll < 0.27 and self.live:
            self.end()
        else:
            self.round()

    def submit(self) -> None:
        rid = f"r{self.number}"
        self.number += 1
        length = self.random.randint(1, 30)
        head = self.random.randint(0, 2) * 100
        tokens = [head + at for at in range(length)]
        tokens += [sampled(at) for at in range(length, length + self.random.randint(0, 8))]
        # Theirs also reserves window blocks of a declared budget while others run.
        windows = any(group.window_tokens for group in self.config.groups)
        budget = 0 if windows else self.random.choice([0, 0, 3, 12])
        self.story.append(("submit", rid, tokens, budget))
        ours = self.ours.submit(rid, tokens, max_new_tokens=budget) is None
        theirs = self.theirs.submit(rid, tokens, budget)
        assert ours == theirs, f"{rid} is taken by one only"
        if ours:
            self.live.append(rid)

    def end(self) -> None:
        rid = self.random.choice(self.live)
        state = self.ours.scheduler._requests.get(rid).state
        finish = state in (State.PREFILLED, State.DECODING) and self.random.random() < 0.7
        self.story.append(("finish" if finish else "abort", rid))
        (self.ours.finish if finish else self.ours.abort)(rid)
        (self.theirs.finish if finish else self.theirs.abort)(rid)
        self.live.remove(rid)

    def round(self) -> None:
        # Near capacity the two abort differently, on purpose.
        while self.live and self.ours.scheduler.free_pages() < 4 * len(self.live):
            self.end()
        self.follow()
        reason = self.difference()
        empty = self.ours.scheduler.empty_pages
        ours, theirs = self.ours.plan(), self.theirs.plan()
        taken = [len(part.blocks) for part in ours.zeroes]
        taken += [len(part.targets) for part in ours.copies]
        # What this very plan freed was used up by ours; theirs gives up a cached page first.
        self.evicted |= sum(taken) > empty
        try:
            self.compare(ours, theirs)
            self.follow()
        except AssertionError:
            # Each may have given up another page for this very plan.
            self.learn()
            if reason is None and self.evicted and self.cached != self.cached_by_theirs:
                reason = GIVEN_UP
            if reason is None:
                raise
            self.restarts[reason] += 1
            self.story.append(f"start anew: {reason}")
            self.start()
            return
        for abort in ours.aborts:
            self.live.remove(abort.rid)
        depth = self.config.overlap_depth if ours.batch is not None else 0
        while len(self.ours.in_flight) > depth:
            self.commit()

    def commit(self) -> None:
        batch = self.ours.in_flight[0]
        rids = [
            self.ours.names[row, gen]
            for row, gen in zip(batch.rows.tolist(), batch.generations.tolist(), strict=True)
        ]
        results = self.ours.results(self.random.randint(1, self.config.decode_tokens))
        self.ours.scheduler.advance([results])
        tokens = np.split(results.tokens, np.cumsum(results.counts)[:-1])
        pairs = [(rid, part.tolist()) for rid, part in zip(rids, tokens, strict=True)]
        self.theirs.commit([rid for rid, _ in pairs], [part for _, part in pairs])

    # -- what is known to differ ------------------------------------------------------

    def follow(self) -> None:
        """Learn what is cached in both; as long as nothing was given up, it must be the same.

        With a forward in flight, theirs offers decoded pages a round later.
        """
        told, told_by_theirs = self.learn()
        if self.config.prefix_caching and not self.evicted and not self.config.overlap_depth:
            assert sorted(told) == sorted(told_by_theirs), "other cache events"

    def learn(self) -> tuple[list, list]:
        """Keep up with what is cached in both; returns what each told of new pages."""
        told = []
        for one in self.ours.scheduler.drain_kv_events():
            if isinstance(one, BlockRemoved):
                self.cached.remove(one.block_hash)
            else:
                self.cached.add(one.block_hash)
                told.append((one.block_hash, one.parent_hash or 0, one.token_ids))
        told_by_theirs = self.theirs.told()
        for block, parent, _tokens in told_by_theirs:
            if parent < 0:
                self.evicted = True
                self.cached_by_theirs.remove(block)
            else:
                self.cached_by_theirs.add(block)
        return told, told_by_theirs

    def difference(self) -> str | None:
        """Return why the next plans may differ, None if they may not."""
        if self.cached != self.cached_by_theirs:
            return GIVEN_UP if self.evicted else LATER
        if self.ours.scheduler.free_pages() != self.theirs.scheduler.available_lcm_blocks():
            return ROOM
        # Events tell only of pages that every group has.
        return PARTS if self.evicted and len(self.config.groups) > 1 else None

    # -- plans ------------------------------------------------------------------------

    def compare(self, ours, theirs) -> None:
        batch = theirs.forward[0]
        rids = self.ours.rids(ours)
        self.story.append(
            (rids, list(batch.request_ids), theirs.pages_to_zero, theirs.pages_to_copy)
        )
        assert rids == list(batch.request_ids), "another batch"
        assert sorted(one.rid for one in ours.aborts) == sorted(
            one.request_id for one in theirs.aborts
        ), "other aborts"
        if rids:
            mine = ours.batch
            assert mine.rows.tolist() == list(batch.request_pool_indices), "other rows"
            assert mine.extends == batch.num_extends(), "another split"
            assert mine.input_lengths.tolist() == list(batch.input_lengths), "other lengths"
            hits = mine.prefix_lengths[: mine.extends].tolist()
            assert hits == list(batch.extend_prefix_lens), "other prefixes"
            assert mine.prompt_lengths.tolist() == list(batch.prefill_lengths)[: mine.extends]
        # Theirs shares equal pages also where prefix caching is off.
        for index, group in enumerate(self.config.groups if self.config.prefix_caching else ()):
            self.compare_pages(index, group, ours, theirs, rids)

    def compare_pages(self, index, group, ours, theirs, rids) -> None:
        names: dict[int, int] = {0: 0}
        back: dict[int, int] = {0: 0}
        tables = theirs.forward[0].block_tables.get(group.group_id, [])
        for at, (rid, row) in enumerate(zip(rids, tables, strict=False)):
            pages = [page for page in row if page >= 0]
            mine = self.ours.tables[index][self.ours.row(rid)][: len(pages)].tolist()
            tokens = int(ours.batch.prefix_lengths[at])
            fresh, passed = self.just_complete(group, tokens), self.passed(group, tokens)
            for column, (one, other) in enumerate(zip(mine, pages, strict=True)):
                if column in fresh or (one == 0 and column in passed):
                    continue
                assert names.setdefault(one, other) == other, f"{rid}: {mine} against {pages}"
                assert back.setdefault(other, one) == one, f"{rid}: {mine} against {pages}"
        self.compare_counts(index, group, ours, theirs, names)

    @staticmethod
    def passed(group, tokens: int) -> range:
        """Return the columns that a row's window has passed.

        Around prefill rounds, theirs lets go of them a round later.
        """
        if group.window_tokens is None:
            return range(0)
        return range(max(tokens - group.window_tokens + 1, 0) // group.block_tokens)

    def just_complete(self, group, tokens: int) -> range:
        """Return the columns of pages that ours may have found cached, theirs only next round.

        That is so with a forward in flight, in rows that have `tokens` tokens.
        """
        if not self.config.overlap_depth or not group.block_tokens:
            return range(0)
        page = self.config.prefix_granularity
        last = tokens // page * page
        if tokens - last >= 2 * self.config.decode_tokens:
            return range(0)
        return range((last - page) // group.block_tokens, last // group.block_tokens)

    def compare_counts(self, index, group, ours, theirs, names) -> None:
        zeroes = [len(part.blocks) for part in ours.zeroes if part.group == index]
        assert sum(zeroes) == len(theirs.pages_to_zero.get(group.group_id, [])), "other zeroes"
        targets = [
            page for part in ours.copies if part.group == index for page in part.targets.tolist()
        ]
        copies = theirs.pages_to_copy.get(group.group_id, [])
        assert len(targets) == len(copies), "other copies"
        theirs_targets = {target for _source, target in copies}
        assert {names[page] for page in targets if page in names} <= theirs_targets
