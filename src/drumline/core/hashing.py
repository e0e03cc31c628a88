"""Hashes that must be the same on every rank and in every process.

A prefix page's identity is a chained SHA-256: a page's digest covers the digest
of the page before it, so equal digests mean equal prefixes. The framing is the
published TokenSpeed scheduler's, all integers u32 little-endian: length of the prior
digest, that digest, token count, tokens; then, for a namespace (a cache salt),
the count of extra keys and each as length and bytes.

Cache events name a page by another chained hash, which is short and which routers
compute as well: 64-bit FNV-1a.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np
import numpy.typing as npt

DIGEST_BYTES = 32

_FNV_OFFSET = 14695981039346656037
_FNV_PRIME = 1099511628211
_U64 = (1 << 64) - 1

_NO_PRIOR = b"\0\0\0\0"
_PRIOR = struct.pack("<I", DIGEST_BYTES)
_AFTER_PRIOR = sha256(_PRIOR)
"""A hash begun with what comes before a prior digest: a copy is had sooner than a new one."""


def extra_keys(salt: str) -> bytes:
    """Return the framed extra keys of a cache namespace; empty for the shared one."""
    if not salt:
        return b""
    key = salt.encode()
    return struct.pack("<II", 1, len(key)) + key


def event_hash(parent: int | None, tokens: bytes) -> int:
    """Return the hash by which cache events name the page that holds `tokens`, int32 bytes.

    It covers a byte that says whether there is a parent, the parent's hash and the count
    of tokens, both u64 little-endian, and the tokens.
    """
    head = b"\0" if parent is None else b"\1" + parent.to_bytes(8, "little")
    value = _FNV_OFFSET
    for byte in b"".join((head, (len(tokens) // 4).to_bytes(8, "little"), tokens)):
        value = (value ^ byte) * _FNV_PRIME & _U64
    return value


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
    pages = len(tokens) // granularity
    frames = np.empty((pages, 1 + granularity), np.int32)
    frames[:, 0] = granularity
    frames[:, 1:] = tokens[: pages * granularity].reshape(pages, granularity)
    digests = []
    after_prior = _AFTER_PRIOR.copy
    # An element a page: thousands become bytes in one call.
    framed = frames.view(f"V{frames.itemsize * frames.shape[1]}").reshape(-1).tolist()
    for frame in [frame + extra for frame in framed] if extra else framed:
        if prior:
            page = after_prior()
            page.update(prior)
            page.update(frame)
        else:
            page = sha256(_NO_PRIOR + frame)
        prior = page.digest()
        digests.append(prior)
    return b"".join(digests)


def next_digests(priors: Sequence[bytes], frames: Sequence[bytes]) -> list[bytes]:
    """Return the digest of the page behind each of `priors`, in the shared namespace.

    `frames[i]` is its count of tokens and those, as int32 bytes.
    """
    after_prior = _AFTER_PRIOR.copy
    digests = []
    for prior, frame in zip(priors, frames, strict=True):
        if prior:
            page = after_prior()
            page.update(prior)
            page.update(frame)
        else:
            page = sha256(_NO_PRIOR + frame)
        digests.append(page.digest())
    return digests
