"""What engines last said of their load, and when it was heard."""

from drumline.contract.outputs import Load
from drumline.contract.ports import Clock

FRESH_US = 3_000_000


class Reports:
    """The last load report and the last output of every engine of a group."""

    def __init__(self, engines: int, clock: Clock) -> None:
        self._clock = clock
        self._loads: list[Load | None] = [None] * engines
        self._heard_us = [0] * engines
        self._output_us = clock.now_us()

    def heard(self, engine: int, load: Load, outputs: bool) -> None:
        """Note an engine's report, just received; `outputs` when tokens came with it."""
        now = self._clock.now_us()
        if load.kv_total_pages > 0:
            self._loads[engine] = load
            self._heard_us[engine] = now
        if outputs:
            self._output_us = now

    @property
    def loads(self) -> tuple[Load, ...]:
        """Every engine's load, by index; empty unless all reported within three seconds."""
        horizon = self._clock.now_us() - FRESH_US
        loads = tuple(
            load
            for load, heard in zip(self._loads, self._heard_us, strict=True)
            if load is not None and heard > horizon
        )
        return loads if len(loads) == len(self._loads) else ()

    @property
    def last_output_age_s(self) -> float:
        """Seconds since an engine last sent tokens, or since the start."""
        return (self._clock.now_us() - self._output_us) / 1e6
