"""Stages whose forwards take time, in virtual time: who waited for whom, and how long.

A stage computes one forward after the other, each once the stage before has it done. Ranks
meet where their exchanges do: at a round's head, and where they adopt the last stage's results.
"""

CONTROL_US = 500
"""What a round takes the control thread."""


class TimedStage:
    """Plants itself in one rank's simulation."""

    def __init__(self, sim, cost_us) -> None:
        """`cost_us` says of a batch how long each stage computes it."""
        self.now_us = 0
        self.began_us = None
        self.busy_us = 0
        self._cost_us = cost_us
        self._group = sim.loop._forwards._pipeline
        self._last_us = [0] * self._group.size
        self._ends = {}
        self._execute, self._complete = sim.plane.execute, sim.plane.complete
        self._adopted, self._exchange = sim.loop._forwards._adopted, sim.loop._relay.exchange
        sim.plane.execute, sim.plane.complete = self.execute, self.complete
        sim.loop._forwards._adopted, sim.loop._relay.exchange = self.adopted, self.exchange

    def exchange(self, *what):
        relayed = self._exchange(*what)
        times = self._group.all_gather_ints([self.now_us])
        self.now_us = max(time for (time,) in times) + CONTROL_US
        return relayed

    def execute(self, plan, dispatch):
        ticket = self._execute(plan, dispatch)
        if ticket is None:
            return None
        cost = self._cost_us(plan.batch)
        end = 0
        for stage, (sent,) in enumerate(self._group.all_gather_ints([self.now_us])):
            start = max(sent, end, self._last_us[stage])
            if self.began_us is None:
                self.began_us = start
            end = self._last_us[stage] = start + cost
            if stage == self._group.index:
                self._ends[ticket] = end
        self.busy_us += cost
        return ticket

    def complete(self, ticket):
        self.now_us = max(self.now_us, self._ends.pop(ticket))
        return self._complete(ticket)

    def adopted(self, result):
        *_, (last,) = self._group.all_gather_ints([self.now_us])
        self.now_us = max(self.now_us, last)
        return self._adopted(result)

    @property
    def bubble(self):
        """The share of a stage's work by which all took longer than a stage that never waits."""
        return (max(self._last_us) - self.began_us) / self.busy_us - 1
