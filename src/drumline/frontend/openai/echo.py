"""A completion's prompt, repeated before its answers.

The log probabilities of a prompt's tokens come with the first piece of its first answer.
Until then the pieces of its other answers wait, as their text begins with the prompt.
"""

from collections.abc import Sequence

from msgspec import Struct

from drumline.frontend.answer import Piece
from drumline.frontend.logprobs import TokenLogprob


class Echo(Struct):
    """One prompt as it is repeated; `told` has its tokens where log probabilities are wanted."""

    text: str
    told: Sequence[TokenLogprob | None] | None = None


class EchoedPieces:
    """Puts each prompt before its answers' pieces."""

    def __init__(
        self,
        texts: Sequence[str],
        prompts: Sequence[Sequence[int]],
        choices: int,
        *,
        with_tokens: bool,
    ) -> None:
        """Repeat `texts`, whose ids are `prompts`, before `choices` answers to each."""
        self._texts = texts
        self._prompts = prompts
        self._choices = choices
        self._with_tokens = with_tokens
        self._told: dict[int, Sequence[TokenLogprob | None]] = {}
        self._begun: set[int] = set()
        self._held: dict[int, list[Piece]] = {}

    def echo(self, index: int) -> Echo:
        """Return the prompt of an answer, with what is known of its tokens."""
        prompt = index // self._choices
        if not self._with_tokens:
            return Echo(self._texts[prompt])
        return Echo(self._texts[prompt], self._told.get(prompt, ()))

    def first_id(self, index: int) -> int:
        """Return the id of the prompt's first token, which has no log probability."""
        return self._prompts[index // self._choices][0]

    def tell(self, index: int, told: Sequence[TokenLogprob | None] | None) -> None:
        """Note what came of a prompt's tokens with an answer to it."""
        if told is not None:
            self._told[index // self._choices] = told

    def ready(self, piece: Piece) -> list[tuple[Echo | None, Piece]]:
        """Return the pieces that can be sent now, the first of each answer with its prompt."""
        prompt, choice = divmod(piece.index, self._choices)
        self.tell(piece.index, piece.prompt)
        # An answer that was given up may end with nothing told; then nothing will be.
        over = choice == 0 and piece.finish_reason is not None
        if self._with_tokens and prompt not in self._told and not over:
            self._held.setdefault(prompt, []).append(piece)
            return []
        if self._with_tokens:
            self._told.setdefault(prompt, ())
        pieces = []
        for each in [*self._held.pop(prompt, ()), piece]:
            first = each.index not in self._begun
            self._begun.add(each.index)
            pieces.append((self.echo(each.index) if first else None, each))
        return pieces
