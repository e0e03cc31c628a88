"""The storage tier: what of it may be asked for now, and how that stands.

Time and permission come in ticks alone. Nothing is asked for before the first tick that
allows it; a plan made while it is forbidden still cancels, and still ends what is late.
"""

from collections.abc import Sequence

from drumline.contract.storage import StorageDone
from drumline.core.errors import InvariantError
from drumline.scheduler.config import SchedulerConfig, StorageLimits
from drumline.scheduler.draft import Draft
from drumline.scheduler.events import StorageStats, Tick
from drumline.scheduler.host import HostTier
from drumline.scheduler.index import IndexArray
from drumline.scheduler.loads import Loads
from drumline.scheduler.matching import Matcher
from drumline.scheduler.requests import Request
from drumline.scheduler.storage.backups import Backups
from drumline.scheduler.storage.gate import PressureGate
from drumline.scheduler.storage.objects import KnownObjects
from drumline.scheduler.storage.operations import Operations
from drumline.scheduler.storage.prefetches import Prefetches, Turns


class StorageTier:
    """Transactions with storage, and when they may start."""

    __slots__ = (
        "_allowed",
        "_backups",
        "_gate",
        "_known",
        "_limits",
        "_now_us",
        "_operations",
        "prefetches",
    )

    def __init__(
        self,
        limits: StorageLimits,
        config: SchedulerConfig,
        matcher: Matcher,
        host: HostTier,
        loads: Loads,
    ) -> None:
        self._limits = limits
        self._gate = PressureGate(limits.pressure_high, limits.pressure_low)
        self._known = KnownObjects(limits.max_known_objects)
        self._operations = Operations(host)
        self._backups = Backups(limits, host, loads, self._operations, self._known)
        self.prefetches = Prefetches(limits, config, matcher, host, self._operations, self._known)
        host.told = self._backups.offer
        self._now_us = -1
        self._allowed = False

    @property
    def pending(self) -> bool:
        """Whether an operation is to be answered or to be planned."""
        return bool(self._operations.unanswered or len(self._backups))

    def tick(self, tick: Tick) -> None:
        """Learn the time, the pressure and what is allowed. Raises where time goes back."""
        if tick.now_us < self._now_us:
            raise InvariantError(
                f"the storage clock went from {self._now_us} us back to {tick.now_us} us"
            )
        self._now_us = tick.now_us
        self._allowed = tick.allow_storage
        self._gate.update(tick.pressure)

    def done(self, done: StorageDone) -> None:
        """Take an operation's answer."""
        self._operations.answer(done)

    def plan(self, draft: Draft) -> Turns:
        """Plan operations; returns who stands aside from the line, and who is back in it."""
        pressed = self._gate.closed
        turns = self.prefetches.plan(self._now_us, draft, allowed=self._allowed, pressed=pressed)
        if self._allowed and len(self._backups):
            held = self._operations.held + self.prefetches.ready_blocks
            self._backups.plan(self._limits.max_host_blocks - held, pressed=pressed, draft=draft)
        self._operations.plan_cancels(draft)
        return turns

    @property
    def clearable(self) -> bool:
        """Whether no answer is to come that would make something findable, or that reads it."""
        return not self._operations.unanswered

    def forget(self) -> None:
        """Forget what is known of objects, what waits to be stored and what was fetched."""
        self._known.clear()
        self._backups.clear()
        self.prefetches.drop_ready()

    def distrust(self) -> None:
        """Store nothing of what was cached so far."""
        self._backups.clear()

    def stats(self) -> StorageStats:
        """Return the counts of what is open, and of what was given up since the start."""
        fetches, backups = self.prefetches, self._backups
        return StorageStats(
            operations=len(self._operations),
            quarantined=self._operations.quarantined,
            held_blocks=self._operations.held + fetches.ready_blocks,
            waiting_requests=fetches.count(ready=False),
            ready_requests=fetches.count(ready=True),
            backup_candidates=len(backups),
            bad_objects=self._known.bad,
            gate_closed=self._gate.closed,
            pressure_bypasses=fetches.bypassed,
            wait_timeouts=fetches.timed_out,
            ready_expirations=fetches.expired,
            pressure_drops=backups.pressed,
            overflow_drops=backups.overflowed,
            unavailable_drops=backups.unavailable,
            disabled_drops=backups.disabled,
        )

    def holds_up(self, request: Request, digest: bytes) -> bool:
        """Whether the request waits for a page that is fetched for another one."""
        return self.prefetches.holds_up(request, digest)

    def explain(self, rid: str) -> str:
        """Say what of storage the request waits for, and until when."""
        return self.prefetches.explain(rid)

    def held(self) -> Sequence[IndexArray]:
        """Return the host blocks that operations and waiting requests hold."""
        return [*self._operations.blocks(), *self.prefetches.held()]

    def check(self, prefetching: int) -> None:
        """Raise InvariantError unless operations and fetches are accounted for."""
        self._operations.check()
        self.prefetches.check(prefetching)


def storage_tier(
    config: SchedulerConfig, matcher: Matcher, host: HostTier, loads: Loads
) -> StorageTier | None:
    """Return the tier, where the configuration has one."""
    if config.storage is None:
        return None
    return StorageTier(config.storage, config, matcher, host, loads)
