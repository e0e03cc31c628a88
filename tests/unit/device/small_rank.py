"""A whole rank on a small model, without processes: the real loop, scheduler and device."""

import numpy as np
from msgspec.structs import replace

from drumline.collective.solo import SoloGroup
from drumline.contract.messages import AbortAsked, Submitted
from drumline.contract.request import GenerateRequest, Sampling
from drumline.control.event_loop import EventLoop, Ranks
from drumline.control.ingress import Limits
from drumline.core.config import (
    CacheConfig,
    Config,
    Dtype,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
)
from drumline.core.hashing import extra_keys, page_digests
from drumline.device.build import build
from drumline.device.data_plane import QueuedDataPlane
from drumline.device.forward_thread import ForwardThread
from drumline.device.parallel import LinkedGroup, LinkedStages
from drumline.replay.clock import ManualClock
from drumline.replay.frontend import ScriptedFrontend
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.scheduler import Scheduler

GRANULARITY = 16
GREEDY = Sampling(top_k=1)


class SmallDevice:
    """A model in memory, on which loops of any settings run one after the other."""

    def __init__(
        self, directory, *, pages=64, rows=8, group=None, tp=1, stages=None, model=None, **cache
    ):
        how = {"dtype": Dtype.FLOAT32, "device": "cpu"} | (model or {})
        self.config = Config(
            model=ModelConfig(model=directory and str(directory), **how),
            cache=CacheConfig(
                max_total_tokens=16 * (pages - 1), prefix_granularity=GRANULARITY, **cache
            ),
            schedule=ScheduleConfig(max_num_seqs=rows),
            parallel=ParallelConfig(
                tensor_parallel_size=tp,
                pipeline_parallel_size=1 if stages is None else stages.size,
            ),
        )
        self.thread = ForwardThread()
        try:
            self.built = build(self.config, self.thread, group, stages)
        except BaseException:
            self.thread.stop()
            raise

    def close(self):
        self.thread.stop()
        self.built.handle.stop()


def half_of(directory, store, index, stages, **how):
    """Return one of two devices that share a model: two stages, or the two ranks of one."""
    if stages == 1:
        group = LinkedGroup(store, index, 2, host="127.0.0.1")
        return SmallDevice(directory, tp=2, group=group, **how)
    linked = LinkedStages(store, index, 2, host="127.0.0.1")
    return SmallDevice(directory, stages=linked, **how)


class SmallRank:
    """A loop on a device; its rounds are run by hand."""

    def __init__(
        self,
        device,
        *,
        depth=1,
        chunk=512,
        retract=0,
        caching=True,
        replica=None,
        leads=True,
        pipeline=None,
    ):
        config = replace(
            device.config,
            schedule=replace(device.config.schedule, chunked_prefill_size=chunk),
            cache=replace(
                device.config.cache,
                debug_force_retraction_interval=retract,
                prefix_caching=caching,
                kvstore=device.config.cache.kvstore and caching,
            ),
        )
        specs = replace(device.built.specs, max_scheduled_tokens=chunk)
        if not caching:
            specs = replace(specs, num_host_pages=1)
        self.clock = ManualClock()
        self.frontend = ScriptedFrontend(self.clock)
        self.scheduler = Scheduler(SchedulerConfig.of(specs, config))
        self.plane = QueuedDataPlane(device.built.handle, device.thread)
        self.loop = EventLoop(
            scheduler=self.scheduler,
            data_plane=self.plane,
            frontend=self.frontend if leads else None,
            clock=self.clock,
            ranks=Ranks(
                replica=replica or SoloGroup(),
                world=SoloGroup(),
                pipeline=pipeline,
                members=tuple(range(replica.size)) if replica else (0,),
            ),
            limits=Limits.of(
                specs,
                self.scheduler.max_request_tokens,
                processors=config.model.logits_processors,
            ),
            specs=specs,
            in_flight_depth=depth,
        )

    def submit(self, rid, prompt, sampling=GREEDY, **how):
        ids = np.array(prompt, np.int32)
        salt = extra_keys(how.get("cache_salt", ""))
        self.frontend.push(
            Submitted(
                GenerateRequest(
                    rid=rid,
                    input_ids=ids,
                    sampling=sampling,
                    page_digests=page_digests(ids, GRANULARITY, salt),
                    **({"ignore_eos": True, "max_new_tokens": 8} | how),
                )
            )
        )

    def abort(self, rid):
        self.frontend.push(AbortAsked((rid,)))

    def run(self, rounds=1, us=1000):
        for _ in range(rounds):
            self.clock.advance(us)
            self.loop.round(False)

    def finish(self):
        """Run until nothing is left to do."""
        for _ in range(5000):
            self.run()
            if not self.frontend.live and not self.frontend.queued and self.loop.idle:
                self.loop.check()
                return
        raise AssertionError(f"still live after 5000 rounds: {sorted(self.frontend.live)}")

    def answer(self, rid):
        return self.frontend.ended(rid)
