"""A piece of a prompt in a batch, as a value."""

from msgspec import Struct

from drumline.scheduler.requests import Request


class Chunk(Struct, frozen=True, eq=False):
    """A piece of a prompt in a batch: `tokens` tokens behind the first `start`."""

    request: Request
    start: int
    tokens: int

    @property
    def next_id(self) -> int:
        """The prompt token behind it, -1 if it is the last chunk."""
        end = self.start + self.tokens
        return int(self.request.tokens[end]) if end < self.request.prompt_tokens else -1
