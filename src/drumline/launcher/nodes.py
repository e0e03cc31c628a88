"""An engine of several machines, as one of them sees it: where it meets the others.

Every machine runs the same command but for its number. The first one serves; it listens where
the operator said that the machines meet, and nowhere else. The others run ranks only.
"""

import hashlib
import logging
import secrets
import socket
from pathlib import Path

from drumline.collective.door import Address, parse_address
from drumline.contract.layout import Layout
from drumline.core.config import Config, ParallelConfig
from drumline.core.errors import ConfigError

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_ANYWHERE = {"0.0.0.0", "::", "*"}


def check_nodes(config: Config) -> None:
    """Raise ConfigError where ranks cannot be spread over the machines as they were said."""
    parallel = config.parallel
    ranks, nodes = parallel.world_size, parallel.nodes
    each = parallel.nprocs_per_node
    if each is not None and each * nodes != ranks:
        raise ConfigError(
            "--nprocs-per-node",
            f"{each} on each of {nodes} machines (--nnodes) are not the {ranks} ranks that "
            "--tensor-parallel-size times --pipeline-parallel-size times --data-parallel-size make",
        )
    if ranks % nodes:
        raise ConfigError("--nnodes", f"{ranks} ranks cannot be shared evenly by {nodes} machines")
    if parallel.node >= nodes:
        raise ConfigError(
            "--node-rank", f"{parallel.node} is no number of {nodes} machines: 0 to {nodes - 1}"
        )
    if nodes == 1:
        return
    if parallel.dist_init_addr is None:
        raise ConfigError(
            "--dist-init-addr",
            f"is not set; the ranks of {nodes} machines (--nnodes) meet at host:port of the first",
        )
    address = meeting_place(parallel)
    if address.host in _ANYWHERE:
        raise ConfigError(
            "--dist-init-addr", f"{address.host} is every address; name the one others can reach"
        )
    frontend = config.frontend
    if (
        frontend.headless
        and frontend.data_parallel_address == _LOOPBACK
        and _leads_elsewhere(parallel)
    ):
        raise ConfigError(
            "--data-parallel-address",
            f"{_LOOPBACK} is another place on each machine; name the frontend's address",
        )


def meeting_place(parallel: ParallelConfig) -> Address:
    """Return where rank 0 listens, as the operator said it. Raises ConfigError."""
    try:
        return parse_address(parallel.dist_init_addr or f"{_LOOPBACK}:0")
    except ConfigError as error:
        raise ConfigError("--dist-init-addr", error.reason) from None


def frontend_host(parallel: ParallelConfig) -> str:
    """Return the address on which the first machine's frontend awaits the ranks.

    It is loopback unless first ranks of replicas run on other machines. Raises ConfigError.
    """
    if not _leads_elsewhere(parallel):
        return _LOOPBACK
    host = meeting_place(parallel).host
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise ConfigError("--dist-init-addr", f"{host!r} is no address: {error}") from None
    return str(found[0][4][0])


def _leads_elsewhere(parallel: ParallelConfig) -> bool:
    """Whether a replica's first rank runs on another machine than the first."""
    last = Layout.of(parallel).leader(parallel.data_parallel_size - 1)
    return last >= parallel.local_ranks


def free_port(host: str) -> int:
    """Return a port of `host` that nobody listens on now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as probe:
        port: int = probe.getsockname()[1]
        return port


def shared_token(parallel: ParallelConfig) -> str:
    """Return what the ranks show each other, in hexadecimal digits. Raises ConfigError."""
    if parallel.nodes == 1:
        return secrets.token_hex(16)
    secret = b""
    if parallel.dist_secret_file is not None:
        try:
            secret = Path(parallel.dist_secret_file).read_bytes().strip()
        except OSError as error:
            reason = f"{parallel.dist_secret_file} cannot be read: {error.strerror}"
            raise ConfigError("--dist-secret-file", reason) from None
        if not secret:
            raise ConfigError("--dist-secret-file", f"{parallel.dist_secret_file} is empty")
    elif parallel.node == 0:
        _log.warning(
            "whoever reaches %s while the engine starts can take a rank's place; "
            "see --dist-secret-file",
            parallel.dist_init_addr,
        )
    return hashlib.sha256(b"drumline ranks" + secret).hexdigest()
