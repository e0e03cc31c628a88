"""How an engine stands: the table of its transitions, and that every call is answered once."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drumline.contract.regions import Region
from drumline.control.standing import (
    UNLOADED,
    AbortAll,
    Asleep,
    CancelUnscheduled,
    Drained,
    Draining,
    Kept,
    Lost,
    PauseAsked,
    Paused,
    PauseMode,
    ReleaseAsked,
    Released,
    Releasing,
    Reply,
    Restore,
    ResumeAsked,
    Serving,
    Unloaded,
    WakeAsked,
    WeightsLoaded,
    WeightsLost,
    dropped,
    frozen,
    gone,
    step,
)

KEEP, WAIT, ABORT = PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT
W, KV = Region.WEIGHTS, Region.KV_CACHE
OK = (Reply(9, True),)


def refused(message):
    return (Reply(9, False, message),)


PAUSING = refused("a pause is already in progress")
RELEASING = refused("a release of memory is already in progress")
HELD = refused("paused with mode keep; call resume_scheduler, or pause with mode wait or abort")

ENDED = (CancelUnscheduled(), AbortAll())

TRANSITIONS = [
    (Serving(), PauseAsked(9, KEEP), Kept(), OK),
    (Serving(), PauseAsked(9, WAIT), Draining(9), (CancelUnscheduled(),)),
    (Serving(), PauseAsked(9, ABORT), Draining(9), (CancelUnscheduled(), AbortAll())),
    (Serving(), ResumeAsked(9), Serving(), OK),
    (Serving(), ReleaseAsked(9), Releasing(9, (W, KV)), (CancelUnscheduled(),)),
    (Serving(), ReleaseAsked(9, (KV,)), Releasing(9, (KV,)), (CancelUnscheduled(),)),
    (Serving(), ReleaseAsked(9, ()), Serving(),
     refused("no tag was named; there are weights, kv_cache")),
    (Serving(), WakeAsked(9), Serving(), OK),
    (Serving(), WakeAsked(9, (KV,)), Serving(), refused("not released: kv_cache")),
    (Serving(), Drained(), Serving(), ()),
    (Serving(), Released(), Serving(), ()),
    (Draining(1), PauseAsked(9, KEEP), Draining(1), PAUSING),
    (Draining(1), ReleaseAsked(9), Draining(1), PAUSING),
    (Draining(1), ResumeAsked(9), Serving(),
     (Reply(1, False, "resumed before the pause drained"), *OK)),
    (Draining(1), WakeAsked(9), Draining(1), OK),
    (Draining(1), Drained(), Paused(), (Reply(1, True),)),
    (Paused(), PauseAsked(9, KEEP), Kept(), OK),
    (Paused(), PauseAsked(9, WAIT), Draining(9), (CancelUnscheduled(),)),
    (Paused(), ResumeAsked(9), Serving(), OK),
    (Paused(), ReleaseAsked(9), Releasing(9, (W, KV), paused=True), (CancelUnscheduled(),)),
    (Paused(), WakeAsked(9), Paused(), OK),
    (Kept(), PauseAsked(9, KEEP), Kept(), OK),
    (Kept(), PauseAsked(9, WAIT), Draining(9), (CancelUnscheduled(),)),
    (Kept(), ResumeAsked(9), Serving(), OK),
    (Kept(), ReleaseAsked(9), Kept(), HELD),
    (Kept(), WakeAsked(9), Kept(), OK),
    (Kept(), Drained(), Kept(), ()),
    (Releasing(1, (W,)), PauseAsked(9, WAIT), Releasing(1, (W,)), RELEASING),
    (Releasing(1, (W,)), ReleaseAsked(9, (KV,)), Releasing(1, (W,)), RELEASING),
    (Releasing(1, (W,)), ResumeAsked(9), Serving(),
     (Reply(1, False, "resumed before the release drained"), *OK)),
    (Releasing(1, (W,)), WakeAsked(9), Releasing(1, (W,)), OK),
    (Releasing(1, (W,)), WakeAsked(9, (W,)), Releasing(1, (W,)), refused("not released: weights")),
    (Releasing(1, (W,)), Drained(), Releasing(1, (W,)), ()),
    (Releasing(1, (W,)), Released(), Asleep((W,)), (Reply(1, True),)),
    (Releasing(1, (W,)), Released("full"), Serving(),
     (Reply(1, False, "nothing was released: full"),)),
    (Releasing(1, (W,), paused=True), Released("full"), Paused(),
     (Reply(1, False, "nothing was released: full"),)),
    (Releasing(1, (W,), (KV,)), Released(), Asleep((W, KV)), (Reply(1, True),)),
    (Releasing(1, (W,), (KV,)), Released("full"), Asleep((KV,)),
     (Reply(1, False, "nothing was released: full"),)),
    (Releasing(1, (W,), (KV,)), ResumeAsked(9), Releasing(1, (W,), (KV,)),
     refused("memory is released (kv_cache); call resume_memory_occupation first")),
    (Releasing(1, (W,), (KV,)), WakeAsked(9), Releasing(1, (W,)), (Restore((KV,)), *OK)),
    (Asleep((KV,)), PauseAsked(9, KEEP), Asleep((KV,)),
     refused("memory is released (kv_cache), so nothing runs")),
    (Asleep((W, KV)), ResumeAsked(9), Asleep((W, KV)),
     refused("memory is released (weights, kv_cache); call resume_memory_occupation first")),
    (Asleep((KV,)), ReleaseAsked(9), Asleep((KV,)), refused("already released: kv_cache")),
    (Asleep((KV,)), ReleaseAsked(9, (W,)), Releasing(9, (W,), (KV,)), (CancelUnscheduled(),)),
    (Asleep((W, KV)), WakeAsked(9, (KV,)), Asleep((W,)), (Restore((KV,)), *OK)),
    (Asleep((W, KV)), WakeAsked(9), Serving(), (Restore((W, KV)), *OK)),
    (Asleep((W,)), WakeAsked(9, ()), Asleep((W,)), OK),
    (Asleep((W,)), Drained(), Asleep((W,)), ()),
    (Serving(), ReleaseAsked(9, drops=True), Releasing(9, (W, KV), drops=True),
     (CancelUnscheduled(),)),
    (Serving(), ReleaseAsked(9, (KV,), True), Serving(),
     refused("to drop the weights is to release them; the tags name kv_cache alone")),
    (Asleep((W,)), ReleaseAsked(9, None, True), Asleep((W,)), refused("already released: weights")),
    (Releasing(1, (W, KV), drops=True), Released(), Asleep((W, KV), True), (Reply(1, True),)),
    (Releasing(1, (W, KV), drops=True), Released("full"), Serving(),
     (Reply(1, False, "nothing was released: full"),)),
    (Releasing(1, (W, KV), drops=True), ResumeAsked(9), Serving(),
     (Reply(1, False, "resumed before the release drained"), *OK)),
    (Asleep((W, KV), True), WakeAsked(9), Unloaded(), (Restore((W, KV)), *OK)),
    (Asleep((W, KV), True), WakeAsked(9, (W,)), Asleep((KV,), True), (Restore((W,)), *OK)),
    (Asleep((W, KV), True), ResumeAsked(9), Asleep((W, KV), True),
     refused("memory is released (weights, kv_cache); call resume_memory_occupation first")),
    (Asleep((KV,), True), WeightsLoaded(), Asleep((KV,)), ()),
    (Asleep((KV,), True), WakeAsked(9), Unloaded(), (Restore((KV,)), *OK)),
    (Asleep((KV,), True), ReleaseAsked(9, (W,)), Releasing(9, (W,), (KV,), dropped=True),
     (CancelUnscheduled(),)),
    (Releasing(1, (W,), (KV,), dropped=True), Released(), Asleep((W, KV), True),
     (Reply(1, True),)),
    (Releasing(1, (W,), (KV,), dropped=True), Released("full"), Asleep((KV,), True),
     (Reply(1, False, "nothing was released: full"),)),
    (Releasing(1, (W,), (KV,), dropped=True), WeightsLoaded(), Releasing(1, (W,), (KV,)), ()),
    (Releasing(1, (W,), dropped=True), ResumeAsked(9), Releasing(1, (W,), dropped=True),
     refused(UNLOADED)),
    (Releasing(1, (W,), dropped=True), Released("full"), Unloaded(),
     (Reply(1, False, "nothing was released: full"),)),
    (Unloaded(), WeightsLoaded(), Serving(), ()),
    (Unloaded(), PauseAsked(9, KEEP), Unloaded(), refused(UNLOADED)),
    (Unloaded(), ResumeAsked(9), Unloaded(), refused(UNLOADED)),
    (Unloaded(), WakeAsked(9), Unloaded(), OK),
    (Unloaded(), WakeAsked(9, (KV,)), Unloaded(), refused("not released: kv_cache")),
    (Unloaded(), ReleaseAsked(9), Releasing(9, (W, KV), dropped=True), (CancelUnscheduled(),)),
    (Unloaded(), WeightsLost("gone"), Lost("gone"), ENDED),
    (Paused(), WeightsLoaded(), Paused(), ()),
    (Serving(), WeightsLoaded(), Serving(), ()),
    (Kept(), WeightsLoaded(), Kept(), ()),
    (Draining(1), WeightsLoaded(), Draining(1), ()),
    (Lost("gone"), WeightsLoaded(), Lost("gone"), ()),
    (Serving(), WeightsLost("gone"), Lost("gone"), ENDED),
    (Kept(), WeightsLost("gone"), Lost("gone"), ENDED),
    (Draining(1), WeightsLost("gone"), Lost("gone"), (*ENDED, Reply(1, False, "gone"))),
    (Releasing(1, (W,), (KV,)), WeightsLost("gone"), Lost("gone", (KV,)),
     (*ENDED, Reply(1, False, "gone"))),
    (Asleep((KV,)), WeightsLost("gone"), Lost("gone", (KV,)), ENDED),
    (Lost("gone"), PauseAsked(9, KEEP), Lost("gone"), refused("gone")),
    (Lost("gone"), ResumeAsked(9), Lost("gone"), refused("gone")),
    (Lost("gone"), ReleaseAsked(9), Lost("gone"), refused("gone")),
    (Lost("gone", (KV,)), WakeAsked(9), Lost("gone", (KV,)), refused("gone")),
    (Lost("gone"), Drained(), Lost("gone"), ()),
    (Lost("gone"), WeightsLost("again"), Lost("gone"), ()),
]  # fmt: skip


@pytest.mark.parametrize(("state", "event", "after", "effects"), TRANSITIONS)
def test_what_follows_from_an_event(state, event, after, effects):
    assert step(state, event) == (after, effects)


class Standing(RuleBasedStateMachine):
    """Whatever is asked in whichever order: one answer each, and memory where it is said to be."""

    def __init__(self):
        super().__init__()
        self.state = Serving()
        self.calls = 0
        self.waiting = set()
        self.away = set()
        self.empty = False

    def apply(self, event):
        self.state, effects = step(self.state, event)
        for effect in effects:
            if isinstance(effect, Reply):
                self.waiting.remove(effect.call)  # KeyError: answered twice
            elif isinstance(effect, Restore):
                assert effect.regions
                self.away.difference_update(effect.regions)

    def ask(self, kind, *args):
        self.calls += 1
        self.waiting.add(self.calls)
        self.apply(kind(self.calls, *args))

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode):
        self.ask(PauseAsked, mode)

    @rule()
    def resume(self):
        self.ask(ResumeAsked)

    @rule(regions=st.none() | st.sets(st.sampled_from(Region)), drops=st.booleans())
    def release(self, regions, drops):
        named = None if regions is None else tuple(sorted(regions, reverse=True))
        self.ask(ReleaseAsked, named, drops)

    @rule(regions=st.none() | st.sets(st.sampled_from(Region)))
    def wake(self, regions):
        self.ask(WakeAsked, None if regions is None else tuple(sorted(regions, reverse=True)))

    @rule()
    def drained(self):
        self.apply(Drained())

    @precondition(lambda self: isinstance(self.state, Releasing))
    @rule(fault=st.none() | st.just("full"))
    def released(self, fault):
        if fault is None:
            assert self.away.isdisjoint(self.state.regions)
            self.away.update(self.state.regions)
            self.empty |= self.state.drops
        self.apply(Released(fault))

    @rule()
    def weights_loaded(self):
        self.empty = False
        self.apply(WeightsLoaded())

    @rule()
    def weights_lost(self):
        self.apply(WeightsLost("gone"))
        assert isinstance(self.state, Lost)

    @invariant()
    def only_a_drain_keeps_a_call_waiting(self):
        assert len(self.waiting) == isinstance(self.state, Draining | Releasing)

    @invariant()
    def memory_that_is_away_is_known_to_be(self):
        assert set(gone(self.state)) == self.away
        assert frozen(self.state) or not self.away
        assert not isinstance(self.state, Asleep) or self.state.gone

    @invariant()
    def without_weights_nothing_runs(self):
        if not isinstance(self.state, Lost):
            assert dropped(self.state) is self.empty
            assert frozen(self.state) or not self.empty


TestStanding = Standing.TestCase
TestStanding.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
