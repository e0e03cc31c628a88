"""The Protocols through which everything enters a round, wired in `rank`.

The control plane is a deterministic function of what these return; a recorder is
one wrapper of each.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from drumline.contract.arrays import NO_INTS, IntArray
from drumline.contract.cache import CacheAck
from drumline.contract.grammar import Attachment, GrammarKey, GrammarState
from drumline.contract.messages import CallReply, Message
from drumline.contract.outputs import Load, OutputColumns
from drumline.contract.plan import Plan
from drumline.contract.profile import Recording, Span, Stage
from drumline.contract.regions import Region
from drumline.contract.request import Admission
from drumline.contract.result import ForwardResult
from drumline.contract.weights import NewWeights, WeightGroup, WeightRows


class Clock(Protocol):
    """Time, as far as the control plane may know it."""

    def now_us(self) -> int:
        """Return monotonic microseconds."""


class Reduce(StrEnum):
    """How values of several ranks become one."""

    MIN = "min"
    MAX = "max"
    SUM = "sum"


class Group(Protocol):
    """A fixed set of ranks that exchange values in step.

    Collective: every member calls the same operation in the same round. Raises
    PeerError when a member is gone, InvariantError when one is in another exchange
    or gives what does not fit the others' parts.
    """

    @property
    def index(self) -> int:
        """This rank's place among the members, from 0."""

    @property
    def size(self) -> int:
        """How many members there are."""

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every member's payload, in member order."""

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Return every member's row of 64-bit ints, in member order; all of one length."""

    def all_reduce(self, values: Sequence[int], how: Reduce) -> list[int]:
        """Return the element-wise reduction of every member's values."""

    def broadcast(self, root: int, payload: bytes) -> bytes:
        """Return the payload of member `root`; what the others pass is ignored."""


class Frontend(Protocol):
    """The link to the frontend, held by the replica's first member.

    Thread: called by the control thread only; encoding and I/O happen on the
    link's own thread.
    """

    @property
    def closed(self) -> bool:
        """The frontend is gone: no message will arrive again."""

    def receive(self, wait_s: float) -> list[Message]:
        """Return what arrived, in order. Waits up to `wait_s` for the first message."""

    def send(self, outputs: OutputColumns, load: Load) -> None:
        """Send one round's outputs with the load; with no outputs, the load alone."""

    def reply(self, reply: CallReply) -> None:
        """Send a control operation's answer."""


class GrammarCompiler(Protocol):
    """Where grammars are compiled, off the round. Nothing here waits for a compile."""

    def request(self, key: GrammarKey) -> GrammarState:
        """Return what is known of a grammar; one that is not known begins its compile."""

    def state(self, key: GrammarKey) -> GrammarState:
        """Return what is known of a grammar that was requested."""


class LogprobPlan(Struct, frozen=True, eq=False):
    """Which batch indices want log probabilities, and how many of the best beside each.

    `prompts` are those of chunks that hold prompt tokens whose log probabilities are wanted.
    """

    indices: IntArray = NO_INTS
    top: IntArray = NO_INTS
    prompts: IntArray = NO_INTS
    prompts_top: IntArray = NO_INTS
    pooled: IntArray = NO_INTS
    """Those of chunks whose prompts become vectors."""


class HistorySeeds(Struct, frozen=True, eq=False):
    """What rows with new owners have read before their first forward.

    Row `rows[i]` has the tokens of positions `starts[i]` to `prefix_lengths[i]`, which lie
    back to back in `tokens`.
    """

    rows: IntArray
    starts: IntArray
    prefix_lengths: IntArray
    tokens: IntArray


class DpRound(Struct, frozen=True):
    """What every data-parallel rank forwards in a round, by rank: what a model whose ranks
    exchange tokens across replicas must know."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    extends: tuple[int, ...]
    idle: bool
    """This rank has nothing to forward and another one has: its forward is an idle one."""


class Dispatch(Struct, frozen=True, eq=False):
    """What a round hands the data plane besides its plan.

    `dp` is None without data parallelism. Where it is idle, the plan has no batch, and an
    idle forward runs in a batch's place.
    """

    logprobs: LogprobPlan | None = None
    dp: DpRound | None = None
    history: HistorySeeds | None = None
    """For a model that reads tokens of before."""


class DataPlane(Protocol):
    """The device side: the closed list of what the control plane may ask of it.

    Operations are queued for the forward thread in call order, and none waits but
    `complete`, `idle_forward` and the rare ones at the end; `poll_cache_acks` is a question,
    answered at once.
    Every operation raises InvariantError once the forward thread has failed.
    """

    def admit(self, requests: Sequence[Admission]) -> None:
        """Learn requests, before a plan names them."""

    def attach_grammars(self, attachments: Sequence[Attachment]) -> None:
        """Hold admitted requests to grammars, before a plan names them."""

    def execute(self, plan: Plan, dispatch: Dispatch) -> int | None:
        """Carry out a plan; returns the ticket of its forward, or None without a batch."""

    def idle_forward(self, dp: DpRound) -> None:
        """Run an idle forward in a frozen round, which executes no plan with one; waits for it.

        The wait keeps a frozen rank from running ahead of the peer whose batch it accompanies.
        """

    def complete(self, ticket: int) -> ForwardResult:
        """Wait for a forward's results. Tickets are completed in order, each once."""

    def poll_cache_acks(self) -> list[CacheAck]:
        """Return the ends of cache operations that landed since the last call; each once."""

    def release(self, rids: Sequence[str]) -> None:
        """Forget ended requests, behind the forwards that read what they hold."""

    def release_memory(self, regions: Sequence[Region]) -> str | None:
        """Give regions of memory back; returns why it cannot, and then all are there.

        Where it can, weights can be dropped as well. No forward and no cache operation may be
        under way, nor any until all are restored.
        """

    def drop_weights(self) -> None:
        """Give the weights' memory back and keep nothing of them, once all ranks can.

        No forward may run until it is restored, and all weights have been loaded again.
        """

    def absent_weight(self) -> str | None:
        """Return a weight that was not loaded since all were dropped, if there is one."""

    def restore_memory(self, regions: Sequence[Region]) -> None:
        """Take regions back: the KV cache blank, weights as they were, or blank if dropped."""

    def open_profile(self, recording: Recording) -> str | None:
        """Make sure that this can be recorded and written, and record nothing; returns why not."""

    def start_profile(self, stage: Stage | None) -> None:
        """Record what is queued from now on, to the file of a stage where there are several."""

    def stop_profile(self, spans: tuple[Span, ...]) -> str | None:
        """Record no more once all that is queued has run, and write that with the control
        thread's `spans`; returns why it could not be written."""

    def open_weights(self, source: NewWeights) -> str | None:
        """Make sure that other weights can be loaded, and change nothing; returns why not."""

    def load_weights(self) -> str | None:
        """Load what was opened; returns why it cannot be.

        What serves is kept meanwhile, or under the policy to discard it let go before.
        """

    def settle_weights(self, taken: bool) -> None:
        """Serve what was loaded from the next forward on, or let go what was opened and loaded."""

    def open_weight_group(self, group: WeightGroup) -> str | None:
        """Make sure that this rank can join a trainer's group, and join none; returns why not.

        Waits for a bounded time until somebody is there to meet.
        """

    def join_weight_group(self) -> str | None:
        """Become a member of the group that was opened; returns why not, or once all have."""

    def leave_weight_group(self, name: str) -> None:
        """Be no member of a group any more, if this rank was one."""

    def read_weight(self, name: str, rows: int) -> WeightRows | str | None:
        """Return this rank's part of a weight's first rows, or why there is none.

        None where another stage of the pipeline has it.
        """
