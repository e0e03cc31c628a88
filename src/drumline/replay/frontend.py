"""A frontend that is a script: what it sends is queued by hand, what it hears is kept.

It holds the engine to the wire's promises: columns of one length, nothing about a
request that is over, and no end twice.
"""

from msgspec import Struct

from drumline.contract.messages import CallAsked, CallReply, Message, Submitted
from drumline.contract.outputs import Load, OutputColumns, PromptColumns
from drumline.core.errors import InvariantError
from drumline.replay.clock import ManualClock


class Told(Struct):
    """What a client has been told of its request."""

    ids: list[int] = []
    logprobs: list[float] = []
    top_ids: list[list[int]] = []
    top_logprobs: list[list[float]] = []
    frames: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    finished: str = ""
    details: dict[str, object] | None = None
    prompt: PromptColumns | None = None


class ScriptedFrontend:
    """The frontend of a simulation."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._queue: list[Message] = []
        self.closed = False
        self.live: dict[str, Told] = {}
        """What clients heard of requests that are not over, by rid."""
        self.over: list[tuple[str, Told]] = []
        """Requests that ended, in order; a rid that was used again stands there again."""
        self.loads: list[tuple[int, Load]] = []
        self.replies: list[CallReply] = []
        self.calls: list[int] = []
        """What was asked for, by call id."""

    def push(self, *messages: Message) -> None:
        """Queue messages for the next receive."""
        self._queue += messages

    @property
    def queued(self) -> int:
        return len(self._queue)

    def receive(self, wait_s: float) -> list[Message]:
        """Return what was queued; an empty wait lets the time pass."""
        if not self._queue:
            self._clock.advance(int(wait_s * 1e6))
        messages, self._queue = self._queue, []
        for message in messages:
            if isinstance(message, Submitted):
                self.live.setdefault(message.request.rid, Told())
            elif isinstance(message, CallAsked):
                self.calls.append(message.call_id)
        return messages

    def send(self, outputs: OutputColumns, load: Load) -> None:
        """Keep one round's outputs. Raises InvariantError if they break the wire's promises."""
        self.loads.append((self._clock.now_us(), load))
        columns = {
            name: len(getattr(outputs, name))
            for name in OutputColumns.__struct_fields__
            if name != "prompts"
        }
        if len(set(columns.values())) != 1:
            raise InvariantError(f"ragged output columns: {columns}")
        for i, rid in enumerate(outputs.rids):
            told = self.live.get(rid)
            if told is None:
                raise InvariantError(f"output for {rid!r}, which is over or was never submitted")
            told.frames += 1
            told.ids += outputs.output_ids[i]
            told.logprobs += outputs.logprobs[i]
            told.top_ids += outputs.top_logprob_ids[i]
            told.top_logprobs += outputs.top_logprobs[i]
            told.prompt_tokens = outputs.prompt_tokens[i]
            told.completion_tokens = outputs.completion_tokens[i]
            told.cached_tokens = outputs.cached_tokens[i]
            told.details = outputs.details[i]
            if i in outputs.prompts:
                if told.prompt is not None:
                    raise InvariantError(f"{rid!r} is told of its prompt twice")
                told.prompt = outputs.prompts[i]
            if outputs.finished_reasons[i]:
                told.finished = outputs.finished_reasons[i]
                self.over.append((rid, self.live.pop(rid)))

    def reply(self, reply: CallReply) -> None:
        """Keep a control operation's answer."""
        self.replies.append(reply)

    def ended(self, rid: str) -> Told:
        """Return what was told of the last request of this id that ended."""
        return next(told for ended, told in reversed(self.over) if ended == rid)
