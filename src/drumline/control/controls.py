"""The control operations: which are asked for, what they allow, how each is answered.

Whether the engine admits and forwards is kept here. An operation that every rank
must run in the same round waits here until the round's gate takes it; a pause that
drains waits for the round to say that it has. It runs nothing itself and knows no
scheduler.
"""

from collections.abc import Callable
from enum import IntEnum, StrEnum

from drumline.contract.messages import CallAsked, CallReply


class PauseMode(StrEnum):
    """What a pause does with the requests that run."""

    ABORT = "abort"  # end them, then stop
    WAIT = "wait"  # let them finish, then stop
    KEEP = "keep"  # stop at once, and keep them


class Permission(IntEnum):
    """What the engine may do; each allows less than the one before."""

    SERVE = 0
    FINISH = 1  # requests that arrive are withheld
    NOTHING = 2  # no forward runs either


class Controls:
    """Operations that wait for their gate or drain, and answers that wait for the round's end."""

    def __init__(self) -> None:
        self._permission = Permission.SERVE
        self._drain: int | None = None
        """The call whose answer waits until nothing runs."""
        self._abort_all = False
        self._flushes: list[int] = []
        self._replies: list[CallReply] = []
        self._curious: list[int] = []
        self._methods: dict[str, Callable[[CallAsked], None]] = {
            "cache_state": self._cache_state,
            "flush_cache": self._flush_cache,
            "is_scheduler_paused": self._is_scheduler_paused,
            "pause_scheduler": self._pause_scheduler,
            "resume_scheduler": self._resume_scheduler,
        }

    def ask(self, call: CallAsked) -> None:
        """Take an operation in; one that waits for nothing is answered at the round's end."""
        method = self._methods.get(call.method)
        if method is not None:
            method(call)
            return
        known = ", ".join(self._methods)
        self._reply(call, False, f"this engine has no operation {call.method!r}; it has {known}")

    @property
    def withholding(self) -> bool:
        """Whether requests that arrive are kept from the scheduler."""
        return self._permission is not Permission.SERVE

    @property
    def frozen(self) -> bool:
        """Whether no forward may run."""
        return self._permission is Permission.NOTHING

    @property
    def draining(self) -> bool:
        """Whether an answer waits until nothing runs."""
        return self._drain is not None

    def drained(self) -> None:
        """Answer the pause that waited for this."""
        if self._drain is not None:
            self._replies.append(CallReply(self._drain, True))
            self._drain = None

    def take_abort_all(self) -> bool:
        """Whether a pause ends every request; true once."""
        taken, self._abort_all = self._abort_all, False
        return taken

    @property
    def flush_wanted(self) -> bool:
        """Whether a cache flush waits for the gate."""
        return bool(self._flushes)

    def flushed(self, success: bool) -> None:
        """Answer the flushes that waited."""
        message = "" if success else "the cache is in use; retry once the running requests ended"
        self._replies += [CallReply(call_id, success, message) for call_id in self._flushes]
        self._flushes.clear()

    @property
    def cache_state_wanted(self) -> bool:
        """Whether somebody wants to know where the pages are."""
        return bool(self._curious)

    def cache_state(self, state: str) -> None:
        """Answer those who wanted to know."""
        self._replies += [CallReply(call_id, True, state) for call_id in self._curious]
        self._curious.clear()

    def take_replies(self) -> list[CallReply]:
        """Return the answers that are due, once."""
        replies, self._replies = self._replies, []
        return replies

    def _reply(self, call: CallAsked, success: bool, message: str = "") -> None:
        self._replies.append(CallReply(call.call_id, success, message))

    def _cache_state(self, call: CallAsked) -> None:
        self._curious.append(call.call_id)

    def _flush_cache(self, call: CallAsked) -> None:
        self._flushes.append(call.call_id)

    def _is_scheduler_paused(self, call: CallAsked) -> None:
        self._reply(call, True, "true" if self.withholding else "false")

    def _pause_scheduler(self, call: CallAsked) -> None:
        asked = call.args[0] if call.args else PauseMode.ABORT
        if isinstance(asked, dict):
            asked = asked.get("mode", PauseMode.ABORT)
        if asked not in tuple(PauseMode):
            modes = ", ".join(PauseMode)
            self._reply(call, False, f"invalid pause mode {asked!r}; it is one of {modes}")
        elif self._drain is not None:
            self._reply(call, False, "a pause is already in progress")
        elif asked == PauseMode.KEEP:
            self._permission = Permission.NOTHING
            self._reply(call, True)
        else:
            self._permission = Permission.FINISH
            self._drain = call.call_id
            self._abort_all = asked == PauseMode.ABORT

    def _resume_scheduler(self, call: CallAsked) -> None:
        if self._drain is not None:
            self._replies.append(CallReply(self._drain, False, "resumed before the pause drained"))
            self._drain = None
        self._permission = Permission.SERVE
        self._abort_all = False
        self._reply(call, True)
