"""How replies of the responses API are framed: events have names, and no sentinel ends them."""

from drumline.core.errors import RequestError
from drumline.frontend.web.dialect import Dialect
from drumline.frontend.web.errors import error_body


def _failure(error: RequestError, request_id: str) -> bytes:
    return error_body(error)


RESPONSES = Dialect(failure=_failure, named=True, end=b"")
