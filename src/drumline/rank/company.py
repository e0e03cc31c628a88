"""The other ranks, as this one meets them: the mesh, and the groups the engine needs.

A rank that is alone has groups of one, and no mesh.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from drumline.collective.mesh import Mesh, join
from drumline.collective.settings import MeshSettings, Seat
from drumline.collective.solo import SoloGroup
from drumline.contract.layout import Layout
from drumline.contract.ports import Group, Reduce
from drumline.contract.specs import DeviceSpecs
from drumline.contract.startup import EXIT_FAILED, RankSettings
from drumline.core.clock import SystemClock
from drumline.core.errors import InvariantError, PeerError

_log = logging.getLogger(__name__)

_WATCH_S = 0.25
_EARLIER_S = 20.0
LOST_GRACE_S = 2.0
"""How long a rank that lost its peers may take to notice in an exchange and say so itself."""


class Company:
    """This rank's place among all. As a context it leaves, and tells the others why."""

    def __init__(self, layout: Layout, rank: int, mesh: Mesh | None) -> None:
        self.layout = layout
        self.rank = rank
        self.replica: Group = self._group(mesh, layout.replica(rank), "replica")
        line = layout.line(rank)
        self.pipeline = self._group(mesh, line, "pipeline") if len(line) > 1 else None
        """The ranks at this one's place in every stage; None for a single stage."""
        self.world: Group = self._group(mesh, layout.peers(rank), "world")
        self._everybody: Group = self._group(mesh, tuple(range(layout.size)), "everybody")
        self._mesh = mesh
        self._left = False

    @staticmethod
    def _group(mesh: Mesh | None, members: tuple[int, ...], name: str) -> Group:
        return SoloGroup() if mesh is None or len(members) == 1 else mesh.group(members, name)

    @property
    def leads(self) -> bool:
        """Whether this is its replica's first member, which holds the frontend's link."""
        return self.replica.index == 0

    @property
    def host(self) -> str:
        """The address of this machine that the other ranks reach; empty for a rank alone."""
        return "" if self._mesh is None else self._mesh.host

    def told(self, text: str) -> str:
        """Return what rank 0 says. Collective: every rank."""
        return self._everybody.broadcast(0, text.encode()).decode()

    def meet(self) -> None:
        """Wait until every rank is here. Collective: every rank."""
        self._everybody.all_reduce([1], Reduce.SUM)

    def compare(self, specs: DeviceSpecs) -> None:
        """Raise InvariantError unless every rank plans with the same geometry.

        Collective: every rank. Replicas must only agree on the model; members on all.
        """
        mine = msgspec.json.encode(specs)
        for member, theirs in enumerate(self.replica.all_gather(mine)):
            if theirs != mine:
                other = self.layout.replica(self.rank)[member]
                raise InvariantError(
                    f"rank {other} of the replica plans with {theirs.decode()}, "
                    f"rank {self.rank} with {mine.decode()}"
                )
        model = msgspec.json.encode(specs.model)
        for place, theirs in enumerate(self.world.all_gather(model)):
            if theirs != model:
                other = self.layout.peers(self.rank)[place]
                raise InvariantError(
                    f"rank {other} serves {theirs.decode()}, rank {self.rank} {model.decode()}"
                )

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        """End this process when a rank is lost and the control thread does not notice.

        It may wait inside a device library, for the same rank, where nothing wakes it up.
        `lost` is told just before.
        """
        mesh = self._mesh
        if mesh is None:
            return

        def wait() -> None:
            while (failure := mesh.failure) is None:
                time.sleep(_WATCH_S)
            time.sleep(LOST_GRACE_S)
            if not self._left:
                lost(PeerError(failure))
                os._exit(EXIT_FAILED)

        threading.Thread(target=wait, name="mesh-watch", daemon=True).start()

    def cause(self, loss: PeerError) -> PeerError:
        """Return the error that names who is gone, where this one was noticed elsewhere first."""
        mesh = self._mesh
        waited_s = 0.0
        while mesh is not None and mesh.failure is None and waited_s < LOST_GRACE_S:
            time.sleep(_WATCH_S)
            waited_s += _WATCH_S
        return loss if mesh is None or mesh.failure is None else PeerError(mesh.failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mesh is None:
            return
        self._left = error is None
        if error is not None:
            self._mesh.fail(f"{type(error).__name__}: {error}")
        self._mesh.close()


def gathered(settings: RankSettings) -> Company:
    """Return this rank's company once every rank has come.

    Collective: every rank. Raises PeerError naming who did not come, ConfigError for an
    address that is of no use.
    """
    parallel = settings.config.parallel
    layout = Layout.of(parallel)
    place = settings.meeting
    if place is None:
        return Company(layout, settings.rank, None)
    listener = None
    if place.listener_fd is not None:
        listener = socket.socket(fileno=place.listener_fd)
        listener.set_inheritable(False)
    seat = Seat(
        settings.rank,
        layout.size,
        place.address,
        bytes.fromhex(place.token),
        parallel.local_ranks if parallel.nodes > 1 else 0,
    )
    # The launcher gives up after all of it, and knows less of who is missing.
    patience_s = settings.config.process.startup_timeout
    patience = MeshSettings(
        startup_timeout_s=max(patience_s / 2, patience_s - _EARLIER_S),
        peer_timeout_s=parallel.peer_timeout or None,
    )
    return Company(layout, settings.rank, join(seat, patience, SystemClock(), listener))
