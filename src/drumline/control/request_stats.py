"""The operator's line per request, written when it is over.

It reads a request that nobody changes any more, and keeps nothing.
"""

import logging

from drumline.control.requests import Ended, Reason

_log = logging.getLogger("drumline.request")


def log_ended(ended: list[Ended]) -> None:
    """Write a line for each request that ended."""
    if not _log.isEnabledFor(logging.INFO):
        return
    for end in ended:
        _log.info("%s", line(end))


def line(end: Ended) -> str:
    """Return a request's line; a time that never came reads -1."""
    request, ending = end.request, end.ending
    started, first = request.scheduled_us, request.first_token_us
    decoding_us = end.at_us - first if first >= 0 else 0
    decode_tps = (end.produced - 1) * 1e6 / decoding_us if decoding_us > 0 else 0.0
    suspended_us = request.suspended_for_us
    if request.suspended_us >= 0:
        suspended_us += end.at_us - request.suspended_us
    status = "ABORTED" if ending.reason is Reason.ABORT else "OK"
    return (
        f"Req: {request.rid} Finish! RequestStats("
        f"status={status}, reason={ending.reason.value}, "
        f"prompt_tokens={request.prompt_tokens}, cache_tokens={request.cached_tokens}, "
        f"output_tokens={end.produced}, "
        f"queue_ms={_ms(request.arrived_us, started)}, prefill_ms={_ms(started, first)}, "
        f"ttft_ms={_ms(request.arrived_us, first)}, total_ms={_ms(request.arrived_us, end.at_us)}, "
        f"preempt_ms={_ms(0, suspended_us)}, preempt_count={request.suspensions}, "
        f"decode_tps={decode_tps:.1f}, acc_len=1.0)"
    )


def _ms(start_us: int, end_us: int) -> float:
    return round((end_us - start_us) / 1000, 1) if end_us >= 0 and start_us >= 0 else -1.0
