"""An engine of several ranks in virtual time, each a real loop on a fake plane.

Ranks are greenlets that meet in their exchanges only, so a seed names the whole run: who
asks for what and when, who takes it back, which planes lag, and in which order ranks go on.
It holds the ranks to what lockstep promises; what a request should be answered is for whoever
asks to check.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

from msgspec import Struct

from drumline.collective.in_process import InProcessMesh, run_ranks
from drumline.collective.solo import SoloGroup
from drumline.contract.layout import Layout
from drumline.contract.ports import Group
from drumline.contract.specs import DeviceSpecs
from drumline.control.standing import PauseMode
from drumline.core.errors import InvariantError
from drumline.replay.simulator import ROUND_US, Simulation, small_specs

_SOMETIMES = 0.3
"""The share of clients that leave, and of runs in which this or that happens."""
_MOST_ROUNDS = 1_500
_QUIET_ROUNDS = 4
"""Rounds that an engine with nothing to do still runs, so that all it held is given back."""


class Asked(Struct, frozen=True):
    """A request of the script, and the engine it is sent to."""

    engine: int
    rid: str
    prompt: tuple[int, ...]
    limit: int
    seed: int


Act = Callable[[Simulation], None]


class Scenario(Struct, frozen=True):
    """What happens to an engine: its shape, its planes' lags, and what it is asked, by round."""

    layout: Layout
    depth: int
    specs: DeviceSpecs
    lags: tuple[int, ...]
    """By rank: operations that stay queued at most; a slow rank has many."""
    asked: tuple[Asked, ...]
    acts: dict[tuple[int, int], list[Act]]
    """By engine and round."""
    suspends_every: int = 0
    """Plans from one suspended request to the next, though there is room; 0 is never."""
    stopper: int = 0
    """The one engine that is told to stop when all is over."""
    closes: bool = False
    """Whether its frontend goes away instead."""

    @property
    def last_round(self) -> int:
        return max((round_ for _, round_ in self.acts), default=0)


def scenario(seed: int) -> Scenario:
    """Draw a scenario: layout, arrivals, aborts, flushes, freezes, slow ranks."""
    rng = random.Random(seed)
    layout = Layout(*rng.choice(((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))))
    layout, depth = _in_stages(layout, seed)
    heads = [[rng.randrange(1, 512) for _ in range(24)] for _ in range(2)]
    asked = []
    acts: defaultdict[tuple[int, int], list[Act]] = defaultdict(list)
    for n in range(rng.randint(1, 3 + 2 * layout.data)):
        head = rng.choice(heads)[: rng.randrange(25)]
        tail = [rng.randrange(1, 512) for _ in range(rng.randint(1, 20))]
        one = Asked(
            engine=rng.randrange(layout.data),
            rid=f"r{n}",
            prompt=(*head, *tail),
            limit=rng.randint(1, 12),
            seed=n % 3,
        )
        asked.append(one)
        when = rng.randrange(20)
        acts[one.engine, when].append(submitting(one))
        if rng.random() < _SOMETIMES:
            acts[one.engine, when + rng.randrange(12)].append(aborting(one.rid))
    if rng.random() < _SOMETIMES:
        when = rng.randrange(25)
        for engine in range(layout.data):
            # A frontend asks each engine by itself, and not all hear of it at once.
            acts[engine, when + rng.randrange(3)].append(calling(1, "flush_cache"))
    if rng.random() < _SOMETIMES:
        engine, when = rng.randrange(layout.data), rng.randrange(15)
        acts[engine, when].append(calling(2, "pause_scheduler", "keep"))
        acts[engine, when + rng.randint(1, 12)].append(calling(3, "resume_scheduler"))
    for engine, when, act in _controls(seed, layout):
        acts[engine, when].append(act)
    slow = rng.choice((0, 0, 3, 1 << 20))
    suspends = rng.random() < 0.5  # noqa: PLR2004
    return Scenario(
        layout=layout,
        depth=rng.randrange(2) if depth is None else depth,
        specs=small_specs(
            num_pages=rng.choice((17, 33, 65)),
            max_rows=rng.choice((2, 8)),
            num_host_pages=rng.choice((1, 33)),
            num_snapshot_pages=33 if suspends else 1,
            max_retracted_requests=4 if suspends else 0,
        ),
        lags=tuple(rng.choice((0, slow)) for _ in range(layout.size)),
        asked=tuple(asked),
        acts=dict(acts),
        suspends_every=rng.choice((0, 3, 7)) if suspends else 0,
        stopper=rng.randrange(layout.data),
        closes=rng.random() < _SOMETIMES,
    )


def _in_stages(layout: Layout, seed: int) -> tuple[Layout, int | None]:
    """Draw whether replicas are pipelines, and then how many forwards are in flight."""
    rng = random.Random(f"{seed}, stages")
    if rng.random() >= _SOMETIMES:
        return layout, None
    stages = rng.choice((2, 2, 3))
    tensor = layout.tensor if stages == 2 and layout.data == 1 else 1  # noqa: PLR2004 - two by two
    return Layout(tensor, layout.data, stages), rng.choice((stages, stages, *range(5)))


def _controls(seed: int, layout: Layout) -> Iterator[tuple[int, int, Act]]:
    """Draw control operations, which reach all engines in one order, early or late."""
    rng = random.Random(f"{seed}, control operations")
    if rng.random() >= _SOMETIMES:
        return
    operations: list[tuple[str, object]] = [
        rng.choice(
            (
                ("pause_scheduler", rng.choice(tuple(PauseMode))),
                ("resume_scheduler", None),
                ("release_memory_occupation", rng.choice((None, ["kv_cache"], ["weights"]))),
                ("resume_memory_occupation", rng.choice((None, ["kv_cache"], ["weights"]))),
                ("start_profile", {"num_steps": rng.randint(1, 9)}),
                ("stop_profile", None),
                ("set_internal_state", {"chunked_prefill_size": rng.randint(1, 32)}),
                ("get_internal_state", None),
                ("flush_cache", None),
                ("update_weight_from_disk", f"/{rng.randrange(100)}"),
                ("update_weights_from_tensor", [b"new"]),
                ("get_weights_by_name", "none"),
            )
        )
        for _ in range(rng.randint(1, 6))
    ]
    # However that went, all serves again in the end: a release that still waits is called off.
    operations += [
        ("resume_scheduler", None),
        ("resume_memory_occupation", None),
        ("resume_scheduler", None),
    ]
    heard = [rng.randrange(10) for _ in range(layout.data)]
    for call_id, (method, argument) in enumerate(operations, 10):
        for engine in range(layout.data):
            yield engine, heard[engine], calling(call_id, method, argument)
            heard[engine] += rng.choice((0, 1, 1, 4, 12))


def submitting(asked: Asked) -> Act:
    """Return the act of sending a request."""
    return lambda sim: sim.submit(
        asked.rid, asked.prompt, max_new_tokens=asked.limit, seed=asked.seed
    )


def aborting(rid: str) -> Act:
    """Return the act of taking a request back."""
    return lambda sim: sim.abort(rid)


def calling(call_id: int, method: str, *args: object) -> Act:
    """Return the act of asking for a control operation."""
    return lambda sim: sim.call(call_id, method, *args)


class Fleet:
    """The ranks of one run, which `play` returns once all have stopped."""

    def __init__(self, played: Scenario, seed: int) -> None:
        self.played = played
        self.sims: dict[int, Simulation] = {}
        self.rounds: dict[int, int] = {}
        self.forwards: dict[int, list[tuple[int, tuple[int, ...]]]] = defaultdict(list)
        """By rank: the rounds in which it ran a forward, and what all ranks forwarded."""
        self.gone: set[tuple[int, int]] = set()
        """Ranks and rounds after which some of a rank's memory was released."""
        self._seed = seed
        self._busy: dict[tuple[int, int], bool] = {}
        """By engine and round: whether something was left to do after it."""

    def owner(self, engine: int) -> Simulation:
        """Return the rank that holds an engine's link to its frontend."""
        return self.sims[self.played.layout.leader(engine)]

    def run_rank(self, mesh: InProcessMesh, planted: Callable[[int, Simulation], None]) -> None:
        """Run one rank until all agreed to stop."""
        layout, rank = self.played.layout, mesh.index
        replica, world, line = layout.replica(rank), layout.peers(rank), layout.line(rank)
        lags, most = random.Random(self._seed + rank), self.played.lags[rank]
        sim = self.sims[rank] = Simulation(
            self.played.specs,
            depth=self.played.depth,
            lag=lambda: lags.randint(0, most),
            # Copies land when they land, on each rank.
            delay=lambda _op: lags.randrange(4),
            force_retraction_interval=self.played.suspends_every,
            replica=_group(mesh, replica, "replica"),
            world=_group(mesh, world, "world"),
            pipeline=mesh.group(line, "pipeline") if len(line) > 1 else None,
            members=replica,
            rank=rank,
        )
        # Clocks of different machines have nothing in common.
        sim.clock.advance(lags.randrange(10**9))
        planted(rank, sim)
        engine, leads = layout.data_index(rank), layout.leads(rank)
        stopper = leads and engine == self.played.stopper
        for round_ in range(_MOST_ROUNDS):
            if leads:
                for act in self.played.acts.get((engine, round_), ()):
                    act(sim)
            over = stopper and self._over(round_)
            sim.frontend.closed = over and self.played.closes
            stop = sim.loop.round(over and not self.played.closes)
            for forward in sim.plane.take_forwards():
                self.forwards[rank].append((round_, forward.tokens if forward else ()))
            if sim.plane.gone:
                self.gone.add((rank, round_))
            if leads:
                # Copies that slow planes have not done yet hold pages, too.
                busy = sim.frontend.live or sim.frontend.queued or not sim.loop.idle
                self._busy[engine, round_] = bool(busy)
            sim.clock.advance(ROUND_US)
            if stop:
                self.rounds[rank] = round_
                return
        raise InvariantError(f"still busy after {_MOST_ROUNDS} rounds; {sim.loop.story()}")

    def _over(self, round_: int) -> bool:
        """Whether nothing is left to be asked or answered, for some rounds by now.

        It looks at rounds that every rank has ended, whoever goes first in this one.
        """
        last = round_ - 2
        engines = range(self.played.layout.data)
        return last - _QUIET_ROUNDS > self.played.last_round and not any(
            self._busy[engine, earlier]
            for engine in engines
            for earlier in range(last - _QUIET_ROUNDS, last + 1)
        )

    def check(self) -> None:
        """Raise InvariantError unless the ranks kept in step and hold nothing any more."""
        layout = self.played.layout
        if len(set(self.rounds.values())) != 1:
            raise InvariantError(f"the ranks stopped after different rounds: {self.rounds}")
        for rank, sim in self.sims.items():
            first = layout.replica(rank)[0]
            if sim.loop.story() != self.sims[first].loop.story():
                raise InvariantError(f"ranks {first} and {rank} of a replica ran different rounds")
            last = self.sims[layout.line(rank)[-1]]
            if sim.plane.seen != last.plane.seen:
                raise InvariantError(f"rank {rank} and the last stage saw different rows")
            # With data parallelism the forwards of all ranks are in the same rounds.
            peer = layout.peers(rank)[0]
            if self.forwards[rank] != self.forwards[peer]:
                raise InvariantError(
                    f"ranks {peer} and {rank} ran forwards in different rounds: "
                    f"{self.forwards[peer]} and {self.forwards[rank]}"
                )
            sim.check_drained()
            if sorted(reply.call_id for reply in sim.frontend.replies) != sorted(
                sim.frontend.calls
            ):
                raise InvariantError(f"rank {rank} did not answer every call once")
        self._check_memory()
        ended = sorted(
            rid for engine in range(layout.data) for rid, _ in self.owner(engine).frontend.over
        )
        if ended != sorted(asked.rid for asked in self.played.asked):
            raise InvariantError(f"not every request ended once: {ended}")

    def _check_memory(self) -> None:
        """Raise InvariantError if a forward ran while any rank's memory was released."""
        away = {round_ for rank, round_ in self.gone if (rank, round_ - 1) in self.gone}
        for rank, forwards in self.forwards.items():
            if without := away.intersection(round_ for round_, _ in forwards):
                raise InvariantError(f"rank {rank} ran forwards in rounds {sorted(without)}")
        if left := [rank for rank, sim in self.sims.items() if sim.plane.gone]:
            raise InvariantError(f"ranks {left} ended without their memory")


def _group(mesh: InProcessMesh, members: tuple[int, ...], name: str) -> Group:
    return SoloGroup() if len(members) == 1 else mesh.group(members, name)


def nothing_planted(rank: int, sim: Simulation) -> None:
    """Change nothing about a rank."""


def play(
    played: Scenario,
    seed: int,
    planted: Callable[[int, Simulation], None] = nothing_planted,
    *,
    order: int = 0,
) -> Fleet:
    """Run a scenario to its end.

    `seed` draws how late each plane is, `order` which rank goes on next. `planted` may change
    each rank before its first round. Raises what a rank raised.
    """
    fleet = Fleet(played, seed)
    run_ranks(played.layout.size, lambda mesh: fleet.run_rank(mesh, planted), seed + order)
    return fleet
