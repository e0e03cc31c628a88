"""`drumline serve`."""

import os

from msgspec.structs import replace

from drumline.cli.verbs import Serve
from drumline.core.config import Config, DistributedBackend
from drumline.core.slurm import placed
from drumline.launcher import serve as launcher
from drumline.launcher.behind_gateway import serve_behind_gateway
from drumline.launcher.headless import serve_headless
from drumline.launcher.rank_process import Ahead


def serve(choices: Serve, ahead: Ahead | None = None) -> int:
    """Serve until a signal ends it; return the exit status."""
    config = replace(choices.config, parallel=placed(choices.config.parallel, os.environ))
    if config.parallel.distributed_backend is DistributedBackend.RAY:
        # Only who asks for Ray waits for it.
        from drumline.launcher.ray_cluster import placed_on_ray  # noqa: PLC0415

        with placed_on_ray(config) as config:
            return _serve(config, None)
    return _serve(config, ahead)


def _serve(config: Config, ahead: Ahead | None) -> int:
    if config.frontend.headless or config.parallel.node > 0:
        return serve_headless(config, _say)
    if config.frontend.gateway is not None:
        return serve_behind_gateway(config, _say)
    return launcher.serve(config, _say, ahead)


def _say(line: str) -> None:
    print(line, flush=True)
