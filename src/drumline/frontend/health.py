"""Whether this server can answer, and whether its engine gets on."""

from typing import Literal

from msgspec import Struct

from drumline.frontend.service import Service


class Health(Struct, frozen=True):
    """The state of server and engine; `reason` names what is wrong."""

    status: Literal["ok", "draining", "stalled", "engine_dead", "weights_lost"]
    reason: str | None = None
    in_flight: int = 0
    last_output_age_s: float | None = None

    @property
    def ok(self) -> bool:
        return self.status == "ok"


def health_of(service: Service) -> Health:
    """Return the health of `service` now.

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
    silent = min(age, engine.busy_s, service.control.serving_s)
    if silent > service.timings.stall_s:
        loads = engine.loads
        if loads:
            running = [f"rank {rank} runs {load.num_running}, {load.num_waiting} wait"
                       for rank, load in enumerate(loads)]  # fmt: skip
            said = "; ".join(running)
        else:
            said = "and no load report for 3 s either"
        return Health(
            "stalled",
            f"{engine.in_flight} requests in flight and no output for {silent:.0f} s: {said}",
            in_flight,
            age,
        )
    if live.draining:
        return Health("draining", "the server is shutting down", in_flight, age)
    return Health("ok", None, in_flight, age)
