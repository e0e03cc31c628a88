"""One engine as its owner sees it: the rank processes, and the client's link to them.

Whoever owns one (the server, or a Python program) starts it, speaks with it through a
frontend `Service`, and stops it. It knows no HTTP.
"""

import asyncio
import logging
from collections import Counter

from msgspec.structs import replace

from drumline.client.engine_client import EngineClient
from drumline.client.routing import policy_of
from drumline.core.config import Config, DistributedBackend, FrontendConfig, LogLevel, tcp
from drumline.core.errors import ConfigError, DrumlineError, PeerError
from drumline.core.model_files import ModelFiles, find_model
from drumline.frontend.service import Service
from drumline.frontend.text.load import load_tokenizer
from drumline.launcher.checks import check, warn_of_strange_ids
from drumline.launcher.nodes import frontend_host
from drumline.launcher.rank_process import Ahead
from drumline.launcher.ranks import OnStep, Ranks
from drumline.wire.handshake import Registration

_log = logging.getLogger(__name__)

_REGISTRATION_S = 10.0
_EPITAPH_S = 2.0
_LEAST_GRACE_S = 5.0


class Engine:
    """An engine: its ranks, and the link to the first rank of every replica.

    Thread: one event loop's, which must outlive the engine.
    """

    def __init__(
        self,
        config: Config,
        *,
        quiet: bool,
        on_step: OnStep | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Find the model and settle what the operator left open; start nothing.

        Raises ConfigError when there is no such model, or it cannot be served like this.
        """
        if config.frontend != FrontendConfig():
            raise ConfigError(
                "--headless" if config.frontend.headless else "--gateway",
                "leaves the ranks to another frontend; only `drumline serve` starts them for it",
            )
        if config.parallel.distributed_backend is not DistributedBackend.MP:
            raise ConfigError(
                "--distributed-backend", "only `drumline serve` asks Ray for machines"
            )
        if config.parallel.node > 0:
            raise ConfigError("--node-rank", "other machines than the first run `drumline serve`")
        self.files: ModelFiles = find_model(config.model.model)
        self._model_ids = check(config, self.files).vocab_size
        self.config: Config = settled(config, self.files, quiet=quiet)
        parallel = self.config.parallel
        self.client = EngineClient(
            parallel.data_parallel_size,
            policy=policy_of(parallel.load_balance_method, self.config.cache.prefix_granularity),
        )
        self.client.weight_version = self.config.model.weight_version
        self.ranks = Ranks(on_step=on_step, ahead=ahead)

    async def service(self) -> Service:
        """Start the engine and wait until it serves; return what speaks text with it.

        The tokenizer loads while the ranks do. Raises as `registered` does.
        """
        tokenizer, registration = await asyncio.gather(
            asyncio.to_thread(load_tokenizer, self.files), self.registered()
        )
        warn_of_strange_ids(tokenizer.vocab_size, self._model_ids)
        model = self.config.model
        return Service(
            self.config.server,
            model.served_model_name,
            self.client,
            registration,
            tokenizer,
            chat=self.config.chat,
            seed=model.seed,
            config=self.config,
        )

    async def registered(self) -> Registration:
        """Start the engine and wait until it serves; return what it says of itself.

        Raises ConfigError when the operator can mend what was met, PeerError when the engine
        failed or took longer than `--startup-timeout`.
        """
        host = frontend_host(self.config.parallel)
        self.ranks.start(self.config, await self.client.bind(tcp(host, "*")))
        ready = await self.ranks.ready(self.config.process.startup_timeout)
        for summary, ranks in Counter(one.summary for one in ready).items():
            _log.info("%s%s", f"{ranks} ranks of " if ranks > 1 else "", summary)
        return await self.client.ready(_REGISTRATION_S)

    async def lost(self) -> DrumlineError:
        """Wait until the engine ends by itself; return the error that says how.

        Whoever waits for an answer is told by then: the first rank may be alive still, and busy
        with what another one died of, so its link says nothing.
        """
        gone = asyncio.create_task(self.ranks.lost())
        closed = asyncio.create_task(self.client.closed.wait())
        try:
            await asyncio.wait((gone, closed), return_when=asyncio.FIRST_COMPLETED)
            # A link that ends is most often a rank that dies; its own story says more.
            await asyncio.wait((gone,), timeout=_EPITAPH_S)
            error = gone.result() if gone.done() else PeerError("the engine closed its link")
            self.client.fail(str(error))
            return error
        finally:
            gone.cancel()
            closed.cancel()

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop the ranks and close the link.

        Ranks that come no further for `grace_s` are killed: what a drain may take by
        default, as a rank first finishes the forward that it is at.
        """
        if grace_s is None:
            grace_s = max(self.config.process.drain_timeout, _LEAST_GRACE_S)
        await self.ranks.stop(grace_s)
        await self.client.close()


def settled(config: Config, files: ModelFiles, *, quiet: bool) -> Config:
    """Return `config` with the model as a path, a served name and a log level."""
    names = config.model.served_model_name or (files.name,)
    level = config.process.log_level or (LogLevel.WARNING if quiet else LogLevel.INFO)
    return replace(
        config,
        model=replace(config.model, model=str(files.path), served_model_name=names),
        process=replace(config.process, log_level=level),
    )
