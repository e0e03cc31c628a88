"""The other machines of an engine, placed on a Ray cluster.

This process is the first machine: it serves, and has Ray start the ranks of every other one, a
task on a node each, with the processors that those ranks need. From then on they are machines
like any other: they meet where they were told and end together. Ray is loaded only here.
"""

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from drumline.collective.door import Address
from drumline.core.config import Config, DistributedBackend, ServerConfig
from drumline.core.errors import ConfigError, PeerError
from drumline.launcher.nodes import check_nodes, free_port
from drumline.launcher.ranks import Ranks

_log = logging.getLogger(__name__)

_STOP_S = 5.0
_ENDED_S = 15.0
"""How long other machines get to end after this one's ranks, and to say what they saw."""


def run_ranks(encoded: bytes, secret: str) -> None:
    """Run one machine's ranks until they end. Raises what made them end.

    Thread: the main thread of a process that Ray started; the ranks die with it.
    """
    with _knowing(msgspec.json.decode(encoded, type=Config), secret) as config:
        asyncio.run(_run(config))


async def _run(config: Config) -> None:
    ranks = Ranks()
    try:
        ranks.start(config, "")
        await ranks.ready(config.process.startup_timeout)
        error = await ranks.over()
    finally:
        await ranks.stop(_STOP_S)
    if error is not None:
        raise error


@contextlib.contextmanager
def _knowing(config: Config, secret: str) -> Iterator[Config]:
    """Yield `config` with a file that holds the ranks' secret, unless it names one."""
    if config.parallel.dist_secret_file is not None:
        yield config
        return
    with tempfile.NamedTemporaryFile("w", prefix="drumline-ranks-") as file:
        file.write(secret)
        file.flush()
        yield replace(config, parallel=replace(config.parallel, dist_secret_file=file.name))


@contextlib.contextmanager
def placed_on_ray(config: Config) -> Iterator[Config]:
    """Start every other machine's ranks; yield what this one is to serve with.

    Raises ConfigError where there is no Ray, no cluster, or too little of it, and PeerError
    when it ends because ranks of another machine failed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--distributed-backend", "Ray is not installed: pip install drumline[ray]"
        )
    # Seconds, and a package that only this back end needs.
    import ray  # noqa: PLC0415

    try:
        ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    except ConnectionError as error:
        reason = f"no Ray cluster is found here; see `ray start` ({error})"
        raise ConfigError("--distributed-backend", reason) from None
    except Exception as error:  # of another version, at an address that is none, full, …
        _log.debug("Ray could not be joined", exc_info=True)
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        reason = f"the Ray cluster cannot be joined: {said}"
        raise ConfigError("--distributed-backend", reason) from None
    try:
        config = _met(config, ray.util.get_node_ip_address())
        check_nodes(config)
        secret = secrets.token_hex(32)
        tasks = _tasks(ray, config, secret)
        watch = _Watch(ray, tasks)
        watch.start()
        try:
            with _knowing(config, secret) as knowing:
                yield knowing
        finally:
            watch.finish()
            for task in tasks:
                ray.cancel(task, force=True)
            # Ray that is asked anything once it is shut down starts a cluster of its own.
            watch.finish()
        watch.check()
    finally:
        ray.shutdown()


def _met(config: Config, host: str) -> Config:
    """Return what the machines run once they are placed, with a place where they meet."""
    parallel = replace(config.parallel, distributed_backend=DistributedBackend.MP)
    config = replace(config, parallel=parallel)
    if parallel.node_rank is not None:
        raise ConfigError("--node-rank", "is Ray's to give; leave it out")
    if parallel.dist_init_addr is not None or parallel.nodes == 1:
        return config
    place = Address(host, free_port(host))
    return replace(config, parallel=replace(parallel, dist_init_addr=str(place)))


def _tasks(ray: Any, config: Config, secret: str) -> list[Any]:
    """Return a running task for each other machine. Raises ConfigError when there are too few."""
    needed = config.parallel.local_ranks
    own = ray.get_runtime_context().get_node_id()
    others = sorted(
        node["NodeID"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != own and node["Resources"].get("CPU", 0) >= needed
    )
    wanted = config.parallel.nodes - 1
    if len(others) < wanted:
        raise ConfigError(
            "--nnodes",
            f"{wanted} nodes besides this one are wanted; {len(others)} of the Ray cluster's have "
            f"the {needed} processors that their ranks need",
        )
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    remote = ray.remote(run_ranks)
    return [
        remote.options(
            num_cpus=needed,
            max_retries=0,
            scheduling_strategy=affinity(node_id=node_id, soft=False),
            name=f"drumline-node{node}",
        ).remote(msgspec.json.encode(_node(config, node)), secret)
        for node, node_id in enumerate(others[:wanted], start=1)
    ]


def _node(config: Config, node: int) -> Config:
    """Return what another machine runs; the server and its keys are the first one's."""
    parallel = replace(config.parallel, node_rank=node)
    return replace(config, parallel=parallel, server=ServerConfig())


class _Watch:
    """Waits for the other machines' tasks; one that fails ends this process's serving, too."""

    def __init__(self, ray: Any, tasks: list[Any]) -> None:
        self._ray = ray
        self._tasks = tasks
        self._over = threading.Event()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._wait, name="ray-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def finish(self) -> None:
        """Let the machines end by themselves for a while, as they do after this one's ranks."""
        self._over.set()
        self._thread.join(_ENDED_S)

    def check(self) -> None:
        """Raise PeerError where another machine's ranks failed."""
        if self._failure is not None:
            raise PeerError(self._failure)

    def _wait(self) -> None:
        waiting = dict(zip(self._tasks, range(1, len(self._tasks) + 1), strict=True))
        while waiting:
            done, _ = self._ray.wait(list(waiting), timeout=1.0)
            for task in done:
                node = waiting.pop(task)
                try:
                    self._ray.get(task)
                except Exception as error:  # whatever the task raised, as Ray wraps it
                    cause = getattr(error, "cause", None) or error
                    self._failed(f"node {node}: {str(cause).strip().splitlines()[-1]}")

    def _failed(self, text: str) -> None:
        if self._failure is None and not self._over.is_set():
            self._failure = text
            _log.error("%s", text)
            # The ranks here may still wait for those; the launcher ends them as on a signal.
            os.kill(os.getpid(), signal.SIGTERM)
