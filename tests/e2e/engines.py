"""An engine of real rank processes, asked over the wire, without an HTTP server."""

import asyncio
import contextlib

import psutil
from tests.e2e.processes import gone_within

from drumline.client.engine_client import EngineClient
from drumline.core.config import (
    CacheConfig,
    Config,
    Dtype,
    LogLevel,
    ModelConfig,
    ParallelConfig,
    ProcessConfig,
    ScheduleConfig,
)
from drumline.launcher.ranks import RANK_COMMAND, Ranks
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams, normalized


class Engine:
    """Running ranks and the client's link to them."""

    def __init__(self, ranks, client, processes) -> None:
        self.ranks: Ranks = ranks
        self.client: EngineClient = client
        self.processes: list[psutil.Process] = processes

    async def tokens(self, rid, prompt, count, *, rank=None, top=0):
        """Return a greedy answer's ids, and how far each was ahead of the second best."""
        request = TokenizedGenerateReqInput(
            rid=rid,
            input_ids=list(prompt),
            sampling_params=normalized(
                SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
            ),
            return_logprob=bool(top),
            top_logprobs_num=top,
            stream=True,
            data_parallel_rank=rank,
        )
        ids, margins = [], []
        async for delta in self.client.submit(request):
            ids += delta.token_ids
            margins += [best[0] - best[1] for best in delta.top_logprobs if best]
        return ids, margins


@contextlib.asynccontextmanager
async def running(
    model, tensor=1, data=1, pipeline=1, *, command=RANK_COMMAND, policy=None, **options
):
    """Yield an engine; afterwards none of its processes may be left."""
    ranks, client = Ranks(command), EngineClient(data, policy=policy)
    try:
        ranks.start(config_of(model, tensor, data, pipeline, **options), await client.bind())
        await ranks.ready(120)
        await client.ready(10)
        processes = [psutil.Process(pid) for pid in ranks.pids]
        yield Engine(ranks, client, processes)
        await ranks.stop(5)
        assert gone_within(processes, 2)
    finally:
        await ranks.stop(5)
        await client.close()


def config_of(model, tensor=1, data=1, pipeline=1, *, peer_timeout=5.0, suspend_every=0):
    """Return the settings of an engine with a small pool."""
    return Config(
        model=ModelConfig(model=str(model), dtype=Dtype.FLOAT32),
        cache=CacheConfig(max_total_tokens=4096, debug_force_retraction_interval=suspend_every),
        schedule=ScheduleConfig(max_num_seqs=16, chunked_prefill_size=64),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor,
            data_parallel_size=data,
            pipeline_parallel_size=pipeline,
            peer_timeout=peer_timeout,
        ),
        process=ProcessConfig(log_level=LogLevel.WARNING, startup_timeout=120),
    )


async def gathered(engine, asked, **options):
    """Return the answers to (prompt, count) pairs, all asked at once."""
    return await asyncio.gather(
        *(
            engine.tokens(f"r{n}", prompt, count, **options)
            for n, (prompt, count) in enumerate(asked)
        )
    )
