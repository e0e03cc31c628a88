"""Whether this server can answer, and whether its engine gets on."""

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

from drumline.frontend.service import Service
from drumline.wire.progress import Progress


class Health(Struct, frozen=True):
    """The state of server and engine; `reason` names what is wrong."""

    status: Literal["ok", "draining", "stalled", "engine_dead", "weights_lost"]
    reason: str | None = None
    in_flight: int = 0
    last_output_age_s: float | None = None
    rounds: tuple[int | None, ...] = ()
    """By rank, the one it is in; empty where that was not heard."""

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def health_of(service: Service, progress: Sequence[Progress | None] = ()) -> Health:
    """Return the health of `service` now, with what its engines say of their `progress`.

    Work that runs without any output for `stall_s` is a stall; an engine without
    work may be silent for as long as it likes, so the age that counts begins when it
    was last given any. A client that sends its body or reads its answer slowly is no
    work of the engine's, and what an operator paused is meant to be silent.
    """
    engine, live = service.engine, service.live
    in_flight = len(live)
    age = engine.last_output_age_s
    if engine.closed.is_set():
        return Health("engine_dead", "the engine's process ended or closed its link", in_flight)
    if engine.weights_lost is not None:
        return Health("weights_lost", engine.weights_lost, in_flight)
    rounds = tuple(None if each is None else each.round for each in progress)
    silent = min(age, engine.busy_s, service.control.serving_s)
    if silent > service.timings.stall_s:
        said = "; ".join(_told(service, progress))
        return Health(
            "stalled",
            f"{engine.in_flight} requests in flight and no output for {silent:.0f} s: {said}",
            in_flight,
            age,
            rounds,
        )
    if live.draining:
        return Health("draining", "the server is shutting down", in_flight, age, rounds)
    return Health("ok", None, in_flight, age, rounds)


def _told(service: Service, progress: Sequence[Progress | None]) -> Iterator[str]:
    """Return what is known of each rank while nothing comes of it."""
    loads = service.engine.loads
    for rank in range(service.engine.engines):
        known = []
        if loads:
            known.append(f"runs {loads[rank].num_running}, {loads[rank].num_waiting} wait")
        where = progress[rank] if progress else None
        if where is not None:
            known.append(f"is in round {where.round} for {where.seconds:.1f} s")
        yield f"rank {rank} {', '.join(known) or 'says nothing'}"
