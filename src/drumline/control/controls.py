"""The control operations: which are asked for, and how each is answered.

An operation that every rank must run in the same round waits here until the
round's gate takes it. It runs nothing itself and knows no scheduler.
"""

from drumline.contract.messages import CallAsked, CallReply

FLUSH_CACHE = "flush_cache"
IS_SCHEDULER_PAUSED = "is_scheduler_paused"
METHODS = (FLUSH_CACHE, IS_SCHEDULER_PAUSED)


class Controls:
    """Operations that wait for their gate, and answers that wait for the round's end."""

    def __init__(self) -> None:
        self._flushes: list[int] = []
        self._replies: list[CallReply] = []

    def ask(self, call: CallAsked) -> None:
        """Take an operation in; one that needs no gate is answered at once."""
        match call.method:
            case "flush_cache":
                self._flushes.append(call.call_id)
            case "is_scheduler_paused":
                self._replies.append(CallReply(call.call_id, True, "false"))
            case _:
                known = ", ".join(METHODS)
                self._replies.append(
                    CallReply(
                        call.call_id,
                        False,
                        f"this engine has no operation {call.method!r}; it has {known}",
                    )
                )

    @property
    def flush_wanted(self) -> bool:
        """Whether a cache flush waits for the gate."""
        return bool(self._flushes)

    def flushed(self, success: bool) -> None:
        """Answer the flushes that waited."""
        message = "" if success else "the cache is in use; retry once the running requests ended"
        self._replies += [CallReply(call_id, success, message) for call_id in self._flushes]
        self._flushes.clear()

    def take_replies(self) -> list[CallReply]:
        """Return the answers that are due, once."""
        replies, self._replies = self._replies, []
        return replies
