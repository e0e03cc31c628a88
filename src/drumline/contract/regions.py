"""The parts of a rank's memory that can be given back while nothing runs."""

from enum import StrEnum


class Region(StrEnum):
    """One of them, by the tag that operators know; they are released in this order."""

    WEIGHTS = "weights"
    """Kept elsewhere meanwhile, and the same bits afterwards."""
    KV_CACHE = "kv_cache"
    """Lost, and blank afterwards."""
