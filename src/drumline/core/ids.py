"""Ids that drumline gives out."""

import uuid


def request_id(prefix: str) -> str:
    """Return a fresh request id such as `chatcmpl-9f…`; ids are never reused."""
    return f"{prefix}-{uuid.uuid4().hex}"
