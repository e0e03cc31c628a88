"""A whole rank but its wire in this process: scheduler, loop and device, run by hand."""

import logging
import time

import numpy as np
import pytest

from drumline.collective.solo import SoloGroup
from drumline.contract.messages import Submitted
from drumline.contract.request import GenerateRequest, Sampling
from drumline.control.event_loop import EventLoop, Ranks
from drumline.control.ingress import Limits
from drumline.core.config import CacheConfig, Config, Dtype, ModelConfig, ScheduleConfig
from drumline.core.hashing import page_digests
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.replay.clock import ManualClock
from drumline.replay.frontend import ScriptedFrontend
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.scheduler import Scheduler

CONTEXT = 160
PROMPT = 60
ROUNDS = 20_000
PROGRESS_S = 60.0
"""How often a run that lasts says where it is."""

_log = logging.getLogger(__name__)


class Rank:
    """An engine of one rank without a wire, run by hand."""

    def __init__(self, model, dtype=Dtype.FLOAT32, *, pages, seqs=16, context=CONTEXT, **cache):
        config = Config(
            model=ModelConfig(model=model, dtype=dtype, max_model_len=context),
            cache=CacheConfig(max_total_tokens=16 * pages, **cache),
            schedule=ScheduleConfig(max_num_seqs=seqs, chunked_prefill_size=256),
        )
        thread = ForwardThread()
        built = build(config, thread)
        self.specs = built.specs
        self.scheduler = Scheduler(SchedulerConfig.of(built.specs, config))
        self.plane = QueuedDataPlane(built.handle, thread)
        self.fed = 0
        self.clock = ManualClock()
        self.frontend = ScriptedFrontend(self.clock)
        self.loop = EventLoop(
            scheduler=self.scheduler,
            data_plane=self,
            frontend=self.frontend,
            clock=self.clock,
            ranks=Ranks(SoloGroup(), SoloGroup()),
            limits=Limits.of(built.specs, self.scheduler.max_request_tokens),
            specs=built.specs,
            in_flight_depth=config.in_flight_depth,
        )

    def __getattr__(self, name):
        return getattr(self.plane, name)

    def execute(self, plan, dispatch):
        self.fed += plan.batch.tokens if plan.batch else 0
        return self.plane.execute(plan, dispatch)

    def ask(self, rid, prompt, sampling, max_new_tokens=None, top=0):
        ids = np.array(prompt, np.int32)
        self.frontend.push(
            Submitted(
                GenerateRequest(
                    rid=rid,
                    input_ids=ids,
                    sampling=sampling,
                    max_new_tokens=max_new_tokens,
                    ignore_eos=True,
                    return_logprob=True,
                    top_logprobs=top,
                    page_digests=page_digests(ids, self.specs.prefix_granularity),
                )
            )
        )

    def run(self, rounds):
        for _ in range(rounds):
            self.loop.round(False)

    def run_until_idle(self):
        began = told = time.monotonic()
        for n in range(ROUNDS):
            self.loop.round(False)
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                _log.info(
                    "after %.0f s and %d rounds: %d tokens fed, %d suspensions, %d requests left",
                    told - began,
                    n,
                    self.fed,
                    self.counters.retractions,
                    len(self.frontend.live),
                )
            if self.loop.idle and not self.frontend.queued:
                self.loop.check()
                return
        raise AssertionError(self.loop.story())

    @property
    def counters(self):
        return self.loop._cache_ops.counters

    def check_drained(self):
        assert not self.frontend.live
        assert self.scheduler.active_pages() == 0
        retraction = self.scheduler._retraction
        assert len(retraction) == 0
        assert retraction._snapshots.pool.empty == self.specs.num_snapshot_pages - 1

    def close(self):
        self.plane.shutdown()


SAMPLINGS = (
    Sampling(top_k=1),
    Sampling(seed=3, temperature=0.9, top_p=0.9),
    Sampling(seed=4, temperature=1.2, frequency_penalty=0.4, repetition_penalty=1.1),
)


def prompts(count, vocab=320, length=PROMPT):
    random = np.random.default_rng(count)
    return [random.integers(1, vocab, length).tolist() for _ in range(count)]


def answers(engine, asked, **fields):
    """Ask all at once; returns ids and log probabilities by request."""
    for n, prompt in enumerate(asked):
        engine.ask(f"r{n}", prompt, SAMPLINGS[n % len(SAMPLINGS)], **fields)
    engine.run_until_idle()
    ends = [engine.frontend.ended(f"r{n}") for n in range(len(asked))]
    assert {each.finished for each in ends} == {"length"}
    return [(each.ids, each.logprobs) for each in ends]


def same(mine, theirs, tolerance):
    for (ids, logprobs), (other, others) in zip(mine, theirs, strict=True):
        assert ids == other
        assert logprobs == pytest.approx(others, abs=tolerance)


def check_fed_once(engine, asked, context=CONTEXT):
    """Each prompt once and each token but the last; an end may be seen one token late."""
    assert 0 <= engine.fed - len(asked) * (context - 1) <= len(asked)


WAVER = {Dtype.FLOAT32: 1e-3, Dtype.BFLOAT16: 0.3}
"""How far apart the two best may be where the rounding of another batch turns them around: a
row's bits depend on how many are computed beside it, and bfloat16 keeps eight of them."""


def told(engine, asked):
    """Ask all at once, greedily; returns what every client was told."""
    for n, prompt in enumerate(asked):
        engine.ask(f"r{n}", prompt, Sampling(top_k=1), top=2)
    engine.run_until_idle()
    ends = [engine.frontend.ended(f"r{n}") for n in range(len(asked))]
    assert {each.finished for each in ends} == {"length"}
    return ends


def parted(mine, ample, waver):
    """Return how many answers part; where one does, the two best were as good as equal."""
    count = 0
    for one, other in zip(mine, ample, strict=True):
        for at, (token, expected) in enumerate(zip(one.ids, other.ids, strict=False)):
            if token != expected:
                best = dict(zip(other.top_ids[at], other.top_logprobs[at], strict=True))
                assert token in best
                assert best[expected] - best[token] < waver
                count += 1
                break
            assert one.logprobs[at] == pytest.approx(other.logprobs[at], abs=waver)
    return count
