"""The engine's side of the frontend wire, on a thread of its own.

`link` holds the sockets and the thread, `intake` turns wire messages into the
control plane's, `outgoing` turns outputs into batches of the wire. The loop sees
`contract.ports.Frontend` only.
"""

from drumline.control.transport.link import CONNECT_TIMEOUT_S, INIT_TIMEOUT_S, Transport

__all__ = ["CONNECT_TIMEOUT_S", "INIT_TIMEOUT_S", "Transport"]
