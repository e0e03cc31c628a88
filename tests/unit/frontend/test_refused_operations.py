"""Every refusal of an operator's route, by status and text: the real control plane behind HTTP."""

import asyncio

import pytest
from tests.fakes.http import run, served

from drumline.frontend.service import Timings
from drumline.replay.simulator import Simulation, small_specs


class Engine:
    """A control plane on a fake device; a few rounds are run for each call."""

    def __init__(self):
        self.sim = Simulation(small_specs(eos_token_ids=(511,)), depth=1)
        self.calls = 0

    def __call__(self, method, *args):
        self.calls += 1
        self.sim.call(self.calls, method, *args)
        self.sim.run(3)
        replies = {reply.call_id: reply for reply in self.sim.frontend.replies}
        reply = replies.get(self.calls)
        return None if reply is None else (reply.success, reply.message)


def running(engine):
    """Have a request run, which holds up what waits for its end."""
    engine.sim.submit("r", range(1, 18), max_new_tokens=100, ignore_eos=True)


def unrecordable(engine):
    engine.sim.plane.unrecordable = "activity 'GPU' cannot be recorded here; CPU, MEM can"


def unreleasable(engine):
    engine.sim.plane.unreleasable = "no room to keep the weights in /tmp"


ASLEEP = "memory is released (weights, kv_cache)"
UNLOADED = (
    "the weights were dropped, and none are loaded; call update_weights_from_disk, once their "
    "memory is there"
)
CANNOT = "cannot be recorded here; CPU, MEM can"

REFUSED = [
    # how the engine is, what was asked before, what is asked, and why not
    (None, (), "/pause?mode=softly",
     "invalid pause mode 'softly'; it is one of abort, wait, keep"),
    (running, ("/pause?mode=wait",), "/pause?mode=keep", "a pause is already in progress"),
    (running, ("/sleep",), "/pause?mode=abort", "a release of memory is already in progress"),
    (None, ("/sleep",), "/pause?mode=keep", f"{ASLEEP}, so nothing runs"),
    (None, ("/sleep",), "/resume", f"{ASLEEP}; call resume_memory_occupation first"),
    (None, (), "/release_memory_occupation?tags=wights",
     "invalid tags ['wights']; there are weights, kv_cache"),
    (None, ("/sleep?tags=weights",), "/sleep", "already released: weights"),
    (running, ("/pause?mode=wait",), "/sleep", "a pause is already in progress"),
    (running, ("/sleep",), "/release_memory_occupation",
     "a release of memory is already in progress"),
    (None, ("/pause?mode=keep",), "/sleep",
     "paused with mode keep; call resume_scheduler, or pause with mode wait or abort"),
    (unreleasable, (), "/sleep",
     "nothing was released: no room to keep the weights in /tmp"),
    (None, (), "/sleep?level=2&tags=kv_cache",
     "to drop the weights is to release them; the tags name kv_cache alone"),
    (None, ("/sleep?level=2",), "/update_weights_from_disk?model_path=x",
     "the weights are released"),
    (None, ("/sleep?level=2", "/wake_up"), "/pause?mode=keep", UNLOADED),
    (None, ("/sleep?level=2", "/wake_up"), "/resume", UNLOADED),
    (None, (), "/wake_up?tags=weights", "not released: weights"),
    (None, (), "/resume_memory_occupation?tags=x",
     "invalid tags ['x']; there are weights, kv_cache"),
    (running, (), "/flush_cache",
     "the cache is in use; retry once the running requests ended"),
    (None, ("/start_profile",), "/start_profile",
     "a profile is already in progress; call stop_profile first"),
    (None, (), "/stop_profile", "no profile is in progress; call start_profile first"),
    (unrecordable, (), "/start_profile?activities=GPU", f"activity 'GPU' {CANNOT}"),
    (None, (), ("/set_internal_state", {"server_args": {"chunked_prefill_size": 33}}),
     "chunked_prefill_size 33 is above 32, with which the rank started"),
    (None, (), ("/set_internal_state", {"server_args": {"tp_size": 2}}),
     "Object contains unknown field `tp_size`; what may be set is chunked_prefill_size, "
     "mixed_batch, mixed_prefill_tokens, max_num_queued_reqs, max_num_queued_tokens"),
    (None, (), ("/set_internal_state", {"server_args": {}}),
     "nothing is to be set; what may be is chunked_prefill_size, mixed_batch, "
     "mixed_prefill_tokens, max_num_queued_reqs, max_num_queued_tokens"),
]  # fmt: skip


def name_of(case):
    path = case[2] if isinstance(case[2], str) else f"{case[2][0]} {case[2][1]['server_args']}"
    return " then ".join([*case[1], path])


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
@run
async def test_a_refusal_is_400_with_its_reason_and_changes_nothing(embedded, case):
    prepare, before, asked, reason = case
    engine = Engine()
    if prepare is not None:
        prepare(engine)
    async with served(embedded, on_call=engine, timings=Timings(control_s=5.0)) as it:
        waiting = []
        for path in before:
            waiting.append(asyncio.create_task(it.http.post(path)))
            # What waits for a request's end is not answered yet.
            await asyncio.wait(waiting[-1:], timeout=0.5)
        state = (await it.http.get("/get_internal_state")).json()["internal_states"][0]
        path, body = (asked, None) if isinstance(asked, str) else asked
        reply = await it.http.post(path, json=body)
        assert reply.status_code == 400
        assert reply.json() == {"success": False, "message": reason}
        after = (await it.http.get("/get_internal_state")).json()["internal_states"][0]
        for told in ("standing", "released", "profiling", "settings"):
            assert after[told] == state[told]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
