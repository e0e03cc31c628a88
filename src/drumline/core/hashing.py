"""Hashes that must be the same on every rank and in every process.

A prefix page's identity is a chained SHA-256: a page's digest covers the digest
of the page before it, so equal digests mean equal prefixes. The framing is the
published TokenSpeed scheduler's, all integers u32 little-endian: length of the prior
digest, that digest, token count, tokens; then, for a namespace (a cache salt),
the count of extra keys and each as length and bytes.
"""

import struct
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32

_NO_PRIOR = b"\0\0\0\0"
_PRIOR = struct.pack("<I", DIGEST_BYTES)


def extra_keys(salt: str) -> bytes:
    """Return the framed extra keys of a cache namespace; empty for the shared one."""
    if not salt:
        return b""
    key = salt.encode()
    return struct.pack("<II", 1, len(key)) + key


@lru_cache(maxsize=1024)
def _counted(tokens: int) -> bytes:
    return struct.pack("<I", tokens)


def page_digest(prior: bytes, tokens: bytes | memoryview, extra: bytes = b"") -> bytes:
    """Return the digest of the page that holds `tokens` behind the page of digest `prior`.

    `tokens` are the page's tokens as int32 bytes. `prior` is empty for a prompt's first
    page. A partial page (a tail) is hashed like a full one, over the tokens it has.
    """
    count = _counted(len(tokens) // 4)
    head = _PRIOR if prior else _NO_PRIOR
    return sha256(b"".join((head, prior, count, tokens, extra))).digest()


def page_digests(
    tokens: npt.NDArray[np.int32], granularity: int, extra: bytes = b"", prior: bytes = b""
) -> bytes:
    """Return the digests of all full pages of `tokens`, 32 bytes each, concatenated."""
    data = np.ascontiguousarray(tokens, np.int32).data.cast("B")
    step = granularity * 4
    digests = []
    for start in range(0, len(tokens) // granularity * step, step):
        prior = page_digest(prior, data[start : start + step], extra)
        digests.append(prior)
    return b"".join(digests)
