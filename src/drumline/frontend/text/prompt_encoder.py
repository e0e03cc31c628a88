"""Encoding prompts without holding up everybody else.

A short text is encoded where it is; a long one on a thread, where the library lets
others run meanwhile. A text that cannot fit is refused before it is encoded.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from drumline.frontend.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 2048

_THREADS = 2


class TooManyTokensError(Exception):
    """A text has at least `tokens` tokens, more than were allowed."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class PromptEncoder:
    """Encodes texts with one tokenizer. Thread: the event loop's."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def encode(self, text: str, *, add_special: bool, most: int | None) -> list[int]:
        """Return the ids of `text`.

        Raises TooManyTokensError for a text that surely has more than `most` tokens;
        one that is returned may still have more. None is any number.
        """
        if len(text) <= INLINE_CHARACTERS:
            return self._tokenizer.encode(text, add_special=add_special)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._encode, text, add_special, most)

    def _encode(self, text: str, add_special: bool, most: int | None) -> list[int]:
        if most is not None:
            fewest = self._tokenizer.fewest_tokens(text)
            if fewest > most:
                raise TooManyTokensError(fewest)
        return self._tokenizer.encode(text, add_special=add_special)

    def close(self) -> None:
        """Let the threads end; what they are at is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
