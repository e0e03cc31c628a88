"""One rank in virtual time: the real loop and scheduler between a script and a fake plane.

Values cross to the plane the way they would cross a process border, encoded and
decoded, so what only works while memory is shared fails here.
"""

from collections.abc import Callable, Sequence

import numpy as np

from drumline.collective.solo import SoloGroup
from drumline.contract.cache import CacheAck, CacheOp
from drumline.contract.grammar import Attachment, GrammarKey
from drumline.contract.messages import AbortAsked, CallAsked, Submitted
from drumline.contract.plan import Plan, decode_plan, encode_plan
from drumline.contract.ports import DataPlane, Dispatch, DpRound, GrammarCompiler, Group
from drumline.contract.profile import Recording, Span, Stage
from drumline.contract.regions import Region
from drumline.contract.request import Admission, GenerateRequest, Pooling, Sampling
from drumline.contract.result import ForwardResult, decode_result, encode_result
from drumline.contract.specs import CacheGroup, DeviceSpecs, ModelFacts
from drumline.contract.weights import NewWeights, WeightGroup, WeightRows
from drumline.control.event_loop import EventLoop, Ranks
from drumline.control.ingress import Limits
from drumline.control.profiles import Place
from drumline.core.config import WritePolicy
from drumline.core.errors import InvariantError
from drumline.core.hashing import page_digests
from drumline.replay.clock import ManualClock
from drumline.replay.frontend import ScriptedFrontend, Told
from drumline.replay.plane import PagedPlane
from drumline.scheduler.config import SchedulerConfig
from drumline.scheduler.scheduler import Scheduler

ROUND_US = 1_000


def small_specs(
    *,
    num_pages: int = 65,
    block_tokens: int = 4,
    prefix_granularity: int = 8,
    max_rows: int = 8,
    max_scheduled_tokens: int = 32,
    max_model_len: int = 128,
    vocab_size: int = 512,
    eos_token_ids: tuple[int, ...] = (0,),
    num_host_pages: int = 1,
    num_snapshot_pages: int = 1,
    max_retracted_requests: int = 0,
    discards_weights: bool = False,
) -> DeviceSpecs:
    """Return the geometry of a device that is small enough to run out of everything."""
    return DeviceSpecs(
        model=ModelFacts(
            name="arithmetic",
            architecture="arithmetic",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            dtype="float32",
        ),
        groups=(CacheGroup(group_id="full", block_tokens=block_tokens),),
        num_pages=num_pages,
        bytes_per_page=8 * block_tokens,
        prefix_granularity=prefix_granularity,
        max_rows=max_rows,
        max_scheduled_tokens=max_scheduled_tokens,
        backend="arithmetic",
        num_host_pages=num_host_pages,
        num_snapshot_pages=num_snapshot_pages,
        max_retracted_requests=max_retracted_requests,
        discards_weights=discards_weights,
    )


class EncodedPlane:
    """A data plane behind a process border that is not there."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    def admit(self, requests: Sequence[Admission]) -> None:
        self._plane.admit(requests)

    def attach_grammars(self, attachments: Sequence[Attachment]) -> None:
        self._plane.attach_grammars(attachments)

    def execute(self, plan: Plan, dispatch: Dispatch) -> int | None:
        return self._plane.execute(decode_plan(encode_plan(plan)), dispatch)

    def idle_forward(self, dp: DpRound) -> None:
        self._plane.idle_forward(dp)

    def complete(self, ticket: int) -> ForwardResult:
        return decode_result(encode_result(self._plane.complete(ticket)))

    def poll_cache_acks(self) -> list[CacheAck]:
        return self._plane.poll_cache_acks()

    def release(self, rids: Sequence[str]) -> None:
        self._plane.release(rids)

    def release_memory(self, regions: Sequence[Region]) -> str | None:
        return self._plane.release_memory(regions)

    def drop_weights(self) -> None:
        self._plane.drop_weights()

    def absent_weight(self) -> str | None:
        return self._plane.absent_weight()

    def restore_memory(self, regions: Sequence[Region]) -> None:
        self._plane.restore_memory(regions)

    def open_profile(self, recording: Recording) -> str | None:
        return self._plane.open_profile(recording)

    def start_profile(self, stage: Stage | None) -> None:
        self._plane.start_profile(stage)

    def stop_profile(self, spans: tuple[Span, ...]) -> str | None:
        return self._plane.stop_profile(spans)

    def open_weights(self, source: NewWeights) -> str | None:
        return self._plane.open_weights(source)

    def load_weights(self) -> str | None:
        return self._plane.load_weights()

    def settle_weights(self, taken: bool) -> None:
        self._plane.settle_weights(taken)

    def open_weight_group(self, group: WeightGroup) -> str | None:
        return self._plane.open_weight_group(group)

    def join_weight_group(self) -> str | None:
        return self._plane.join_weight_group()

    def leave_weight_group(self, name: str) -> None:
        self._plane.leave_weight_group(name)

    def read_weight(self, name: str, rows: int) -> WeightRows | str | None:
        return self._plane.read_weight(name, rows)


class Simulation:
    """A rank whose rounds are run by hand."""

    def __init__(
        self,
        specs: DeviceSpecs | None = None,
        *,
        depth: int = 0,
        lag: Callable[[], int] = lambda: 0,
        encoded: bool = False,
        faulty: frozenset[str] = frozenset(),
        delay: Callable[[CacheOp], int] = lambda _op: 0,
        failing: Callable[[CacheOp], bool] = lambda _op: False,
        mixed_batch: bool = True,
        prefix_caching: bool = True,
        max_queued_requests: int | None = None,
        force_retraction_interval: int = 0,
        host_write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        replica: Group | None = None,
        world: Group | None = None,
        pipeline: Group | None = None,
        grammars: GrammarCompiler | None = None,
        members: tuple[int, ...] = (),
        rank: int = 0,
        weight_version: str = "default",
    ) -> None:
        self.specs = specs or small_specs()
        self.clock = ManualClock()
        self.frontend = ScriptedFrontend(self.clock)
        stages = 1 if pipeline is None else pipeline.size
        self.plane = PagedPlane(
            self.specs,
            lag=lag,
            faulty=faulty,
            delay=delay,
            failing=failing,
            stages=stages,
            samples=pipeline is None or pipeline.index == stages - 1,
        )
        self.scheduler = Scheduler(
            SchedulerConfig(
                groups=self.specs.groups,
                num_pages=self.specs.num_pages,
                prefix_granularity=self.specs.prefix_granularity,
                max_rows=self.specs.max_rows,
                max_scheduled_tokens=self.specs.max_scheduled_tokens,
                max_model_tokens=self.specs.model.max_model_len,
                overlap_depth=depth if stages == 1 else 0,
                stages=stages,
                mixed_batch=mixed_batch,
                prefix_caching=prefix_caching,
                max_queued_requests=max_queued_requests,
                num_host_pages=self.specs.num_host_pages if prefix_caching else 1,
                host_write_policy=host_write_policy,
                num_snapshot_pages=self.specs.num_snapshot_pages,
                max_retracted_requests=self.specs.max_retracted_requests,
                debug_force_retraction_interval=force_retraction_interval,
            )
        )
        self.loop = EventLoop(
            scheduler=self.scheduler,
            data_plane=EncodedPlane(self.plane) if encoded else self.plane,
            frontend=self.frontend if replica is None or replica.index == 0 else None,
            clock=self.clock,
            ranks=Ranks(
                replica=replica or SoloGroup(),
                world=world or SoloGroup(),
                pipeline=pipeline,
                members=members,
                rank=rank,
            ),
            limits=Limits.of(
                self.specs, self.scheduler.max_request_tokens, grammars=grammars is not None
            ),
            specs=self.specs,
            in_flight_depth=depth,
            grammars=grammars,
            profiles=Place("/profiles"),
            weight_version=weight_version,
        )
        self.rounds = 0

    def submit(
        self,
        rid: str,
        prompt: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        seed: int = 0,
        stream: bool = True,
        stop_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        min_new_tokens: int = 0,
        top_logprobs: int | None = None,
        prompt_logprobs_from: int = -1,
        deadline_us: int = 0,
        pooling: Pooling | None = None,
        grammar: GrammarKey | None = None,
    ) -> None:
        """Send a request; it arrives in the next round."""
        ids = np.array(prompt, np.int32)
        self.frontend.push(
            Submitted(
                GenerateRequest(
                    rid=rid,
                    input_ids=ids,
                    sampling=Sampling(seed=seed),
                    max_new_tokens=max_new_tokens,
                    min_new_tokens=min_new_tokens,
                    stop_token_ids=stop_token_ids,
                    ignore_eos=ignore_eos,
                    stream=stream,
                    return_logprob=top_logprobs is not None or prompt_logprobs_from >= 0,
                    top_logprobs=top_logprobs or 0,
                    prompt_logprobs_from=prompt_logprobs_from,
                    deadline_us=deadline_us,
                    pooling=pooling,
                    grammar=grammar,
                    page_digests=page_digests(ids, self.specs.prefix_granularity),
                )
            )
        )

    def abort(self, *rids: str) -> None:
        """Send an abort; it arrives in the next round."""
        self.frontend.push(AbortAsked(rids))

    def call(self, call_id: int, method: str, *args: object) -> None:
        """Send a control operation; it arrives in the next round."""
        self.frontend.push(CallAsked(call_id, method, args))

    def run(self, rounds: int) -> None:
        """Run some rounds."""
        for _ in range(rounds):
            self.loop.round(False)
            self.rounds += 1
            self.clock.advance(ROUND_US)

    def run_until_idle(self, limit: int = 2_000) -> None:
        """Run rounds until nothing is left to do. Raises InvariantError after `limit` rounds."""
        for _ in range(limit):
            self.run(1)
            if self.loop.idle and not self.frontend.queued:
                return
        raise InvariantError(f"still busy after {limit} rounds; {self.loop.story()}")

    def answer(self, rid: str) -> Told:
        """Return what the client of an ended request was told."""
        return self.frontend.ended(rid)

    def check_drained(self) -> None:
        """Raise InvariantError unless everything that was given out is back."""
        self.loop.check()
        if self.frontend.live:
            raise InvariantError(f"requests that never ended: {sorted(self.frontend.live)}")
        if self.scheduler.active_pages():
            raise InvariantError(f"{self.scheduler.active_pages()} pages are still held")
        if self.plane.known:
            raise InvariantError(f"the data plane still holds {self.plane.known} requests")
