"""Where the weights of a running engine are to come from."""

from msgspec import Struct


class DiskWeights(Struct, frozen=True):
    """A checkpoint on a disk that every rank can read: a directory or a file."""

    path: str
