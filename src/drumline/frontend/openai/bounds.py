"""Bounds of numbers that requests say, and the refusal of what lies outside."""

from drumline.core.errors import RequestError

OPEN_ZERO = 1e-9
"""The least of what must be above zero."""
MOST_TOKENS = (1 << 31) - 1


def check(name: str, value: float, least: float, most: float | None) -> None:
    """Raise RequestError 400 naming `name` unless `value` is from `least` to `most`."""
    if value >= least and (most is None or value <= most):
        return
    kind = "integer" if isinstance(least, int) else "decimal"
    bounds = f"at least {least}" if most is None else f"at least {least} and at most {most}"
    said = f"{value}" if abs(value) < MOST_TOKENS else "too large a number"
    side = "below_min" if value < least else "above_max"
    raise RequestError(
        400, f"{name} is {said}; it must be {bounds}", param=name, code=f"{kind}_{side}_value"
    )
