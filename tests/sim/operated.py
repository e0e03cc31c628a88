"""Engines of several ranks that an operator calls while they answer."""

from drumline.replay.fleet import Asked, Scenario, calling, submitting
from drumline.replay.simulator import small_specs

SPECS = small_specs(eos_token_ids=(511,))
PROMPT = tuple(range(1, 18))


def said(sim):
    """What was answered to each call."""
    return {reply.call_id: (reply.success, reply.message) for reply in sim.frontend.replies}


def long_requests(limit):
    """A request of each engine's own, from the first round on."""
    return lambda engine: [(0, Asked(engine, f"r{engine}", (*PROMPT, engine), limit, 1))]


def before_and_after(engine):
    """A request before what is called, and one of the same prompt after it."""
    return [(when, Asked(engine, f"r{engine}-{when}", PROMPT, 4, 1)) for when in (0, 40)]


def on_all(layout, calls, late=0):
    """Calls (round, method, …) of every engine, which hears of them `late` after the one before."""
    return [
        (round_ + late * engine, engine, number, *operation)
        for engine in range(layout.data)
        for number, (round_, *operation) in enumerate(calls)
    ]


def on_each(calls):
    """Calls (round, engine, method, …) of one engine each."""
    return [
        (round_, engine, number, *operation)
        for number, (round_, engine, *operation) in enumerate(calls)
    ]


def engines(layout, requests, calls, specs=SPECS, last=70):
    """A scenario of each engine's requests, and of calls of those there are, until round `last`."""
    asked, acts = [], {(0, last): []}
    for engine in range(layout.data):
        for when, one in requests(engine):
            asked.append(one)
            acts.setdefault((engine, when), []).append(submitting(one))
    for round_, engine, number, *operation in calls:
        if engine < layout.data:
            acts.setdefault((engine, round_), []).append(calling(number, *operation))
    return Scenario(layout, 1, specs, (0,) * layout.size, tuple(asked), acts)
