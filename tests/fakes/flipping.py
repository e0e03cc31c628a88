"""A scheduler that goes astray once, as one rank's might by a fault of ours."""

from msgspec.structs import replace


class Flipping:
    """A real scheduler, but for one plan with a batch: it names another row than was planned.

    `due` is asked of every plan with a batch; the first it says yes to is changed.
    """

    def __init__(self, scheduler, due):
        self._scheduler = scheduler
        self._due = due
        self.flipped = None
        """The round in which it went astray."""

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def plan(self):
        plan = self._scheduler.plan()
        if self.flipped is not None or plan.batch is None or not self._due(plan):
            return plan
        self.flipped = plan.round
        rows = plan.batch.rows.copy()
        rows[-1] ^= 1
        return replace(plan, batch=replace(plan.batch, rows=rows))
