"""Ranks that are killed, stopped, or go astray at some moment: the tree ends whole, or goes on.

DRUMLINE_SOAK_ENDS=N plays every rank of every layout, N times each (`make soak`).
"""

import asyncio
import concurrent.futures
import itertools
import os
import random
import re
import signal
import sys
import time

import httpx
import psutil
import pytest
from tests.e2e.engines import config_of, running
from tests.e2e.processes import Server, gone_within

from drumline.contract.layout import Layout
from drumline.core.errors import ConfigError, PeerError
from drumline.launcher.ranks import Ranks

SOAK = int(os.environ.get("DRUMLINE_SOAK_ENDS", "0"))
TENSOR, DATA, BOTH, STAGES = Layout(2, 1), Layout(1, 2), Layout(2, 2), Layout(1, 1, 2)
LAYOUTS = (TENSOR, DATA, BOTH, STAGES, Layout(2, 1, 2))
EVERY_RANK = [(layout, rank) for layout in LAYOUTS for rank in range(layout.size)] * SOAK


def named(value):
    """Return what a test calls a layout: its sizes, tensor-parallel first."""
    if isinstance(value, Layout):
        return f"tp{value.tensor} dp{value.data} pp{value.pipeline}"
    return str(value)


def of_ranks(*quick):
    """Parametrize by layout and the rank that something happens to."""
    return pytest.mark.parametrize(("layout", "victim"), EVERY_RANK or quick, ids=named)


def laid_out(model, layout, **options):
    """Return an engine of these ranks."""
    return running(model, layout.tensor, layout.data, layout.pipeline, **options)


def long_answers(engine, count=4):
    """Ask for answers that outlast what is about to happen."""
    return [asyncio.ensure_future(engine.tokens(f"r{n}", [n, 2, 3], 400)) for n in range(count)]


async def some_time():
    await asyncio.sleep(random.uniform(0.02, 0.7))


@of_ranks((TENSOR, 0), (DATA, 1), (BOTH, 3), (STAGES, 0))
def test_a_killed_rank_ends_the_others_and_is_named(tiny_model, layout, victim):
    async def run():
        async with laid_out(tiny_model, layout) as engine:
            streams = long_answers(engine)
            await some_time()
            began = time.perf_counter()
            os.kill(engine.ranks.pids[victim], signal.SIGKILL)
            error = await asyncio.wait_for(engine.ranks.lost(), 5)
            assert str(error).startswith(f"rank {victim} was killed by SIGKILL while serving")
            # Nobody has stopped them yet.
            assert await asyncio.to_thread(gone_within, engine.processes, 5)
            assert time.perf_counter() - began < 8
            for ended in await asyncio.gather(*streams, return_exceptions=True):
                assert isinstance(ended, PeerError | tuple)

    asyncio.run(run())


@of_ranks((TENSOR, 1), (DATA, 0))
def test_a_stopped_rank_is_given_up_within_its_bound(tiny_model, layout, victim):
    async def run():
        async with laid_out(tiny_model, layout, peer_timeout=1.5) as engine:
            streams = long_answers(engine)
            await some_time()
            began = time.perf_counter()
            os.kill(engine.ranks.pids[victim], signal.SIGSTOP)
            error = await asyncio.wait_for(engine.ranks.lost(), 10)
            assert time.perf_counter() - began < 8
            assert re.search(rf"rank {victim}\b", str(error))
            others = [one for n, one in enumerate(engine.processes) if n != victim]
            assert await asyncio.to_thread(gone_within, others, 5)
            os.kill(engine.ranks.pids[victim], signal.SIGCONT)
            assert await asyncio.to_thread(gone_within, engine.processes, 5)
            await asyncio.gather(*streams, return_exceptions=True)

    asyncio.run(run())


@of_ranks((TENSOR, 0), (DATA, 1))
def test_a_rank_that_is_stopped_and_continued_goes_on(tiny_model, layout, victim, capfd):
    async def run():
        async with laid_out(tiny_model, layout, peer_timeout=0) as engine:
            expected, _ = await engine.tokens("before", [1, 2, 3], 150, rank=0)
            stream = asyncio.ensure_future(engine.tokens("during", [1, 2, 3], 150, rank=0))
            await asyncio.sleep(random.uniform(0, 0.1))
            os.kill(engine.ranks.pids[victim], signal.SIGSTOP)
            await asyncio.sleep(3)
            assert not stream.done()
            os.kill(engine.ranks.pids[victim], signal.SIGCONT)
            ids, _ = await asyncio.wait_for(stream, 60)
            assert ids == expected

    asyncio.run(run())
    said = capfd.readouterr().err
    assert re.search(rf"rank {victim} has not been heard .*; it is waited for", said)
    assert f"rank {victim} is heard again" in said


@of_ranks((BOTH, 2))
def test_a_rank_that_is_killed_while_all_start_fails_the_start(tiny_model, layout, victim):
    ranks = Ranks()

    async def run():
        ranks.start(
            config_of(tiny_model, layout.tensor, layout.data, layout.pipeline), "tcp://127.0.0.1:1"
        )
        starting = asyncio.ensure_future(ranks.ready(60))
        try:
            await asyncio.sleep(random.uniform(0, 2))
            os.kill(ranks.pids[victim], signal.SIGKILL)
            with pytest.raises(PeerError, match=rf"rank {victim} was killed by SIGKILL at '.*'"):
                await asyncio.wait_for(starting, 10)
        finally:
            await ranks.stop(2)

    asyncio.run(run())
    for pid in ranks.pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


ENDINGS = [(*of, ending) for of in EVERY_RANK for ending in (signal.SIGKILL, signal.SIGSTOP)] or [
    (BOTH, 1, signal.SIGSTOP),
    (STAGES, 1, signal.SIGKILL),
]


@pytest.mark.parametrize(("layout", "victim", "ending"), ENDINGS, ids=named)
def test_a_server_of_which_a_rank_ends_or_hangs_ends_with_1(tiny_model, layout, victim, ending):
    sizes = {
        "--tensor-parallel-size": layout.tensor,
        "--data-parallel-size": layout.data,
        "--pipeline-parallel-size": layout.pipeline,
    }
    flags = [*itertools.chain(*sizes.items()), "--peer-timeout", 1.5]
    server = Server(str(tiny_model), "--max-total-tokens", "4096", *map(str, flags))
    try:
        server.wait_ready()
        ranks = sorted(server.ranks(), key=lambda rank: rank.pid)
        body = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            time.sleep(random.uniform(0, 0.3))
            os.kill(ranks[victim].pid, ending)
            assert any("error" in line for line in lines)
        assert server.wait(20) == 1, server.said
        assert re.search(rf"^drumline: .*\brank {victim}\b", server.lines[-1]), server.said
        assert gone_within(ranks, 2)
    finally:
        server.close()


@pytest.mark.parametrize("workers", [1, 2])
def test_an_operator_is_answered_when_a_rank_dies_amid_an_operation(tiny_model, workers):
    server = Server(
        *(str(tiny_model), "--max-total-tokens", "4096", "--pipeline-parallel-size", "2"),
        *("--api-server-count", str(workers)),
    )
    try:
        children = server.wait_ready().ranks()
        first, last = sorted(each.pid for each in children if "http" not in each.cmdline()[0])
        # Whatever the first rank is busy with keeps it from hearing of the other one's end.
        os.kill(first, signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            path = f"{server.url}/update_weights_from_disk"
            asking = pool.submit(httpx.post, path, json={"model_path": "/x"}, timeout=30)
            time.sleep(0.5)
            os.kill(last, signal.SIGKILL)
            answer = asking.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert "rank 1 was killed by SIGKILL" in answer.json()["error"]["message"]
        assert server.wait(30) == 1, server.said
    finally:
        server.close()


def faulty(fault, rank):
    return (sys.executable, "-m", "tests.fakes.faulty_rank", fault, str(rank))


# A replica of one rank has nobody to differ from.
@pytest.mark.parametrize(
    ("layout", "victim"),
    [each for each in EVERY_RANK if each[0].members > 1] or [(BOTH, 3)],
    ids=named,
)
def test_a_rank_that_goes_astray_is_told_by_round_rank_and_field_and_all_stop_there(
    tiny_model, layout, victim, capfd
):
    async def run():
        command = faulty("flips", victim)
        async with laid_out(tiny_model, layout, command=command) as engine:
            streams = long_answers(engine)
            error = await asyncio.wait_for(engine.ranks.lost(), 20)
            assert await asyncio.to_thread(gone_within, engine.processes, 5)
            await asyncio.gather(*streams, return_exceptions=True)
            return str(error)

    error = asyncio.run(run())
    said = capfd.readouterr().err
    (flipped,) = re.findall(r"flipped in round (\d+)", said)
    first = layout.replica(victim)[0]
    told = re.search(
        r"in round (\d+), rank (\d+) has rows (0x\w+) where rank (\d+) has (0x\w+)", error
    )
    assert told is not None, error
    # Where the replica's first rank is the one that differs, it is still what others differ from.
    astray = victim if victim != first else first + 1
    assert (told[1], told[2], told[4]) == (flipped, str(astray), str(first))
    assert told[3] != told[5]
    stories = said.split("the last rounds:\n")[1:]
    assert len(stories) == layout.members, "each rank of the replica tells its story"
    for story in stories:
        rounds = re.findall(r"RoundRecord\(digest=Digest\(round=(\d+)", story)
        assert rounds[-1] == flipped, "nobody went beyond that round"
    others = layout.size - layout.members
    assert len(re.findall(rf"the rank stops at 'serving': .*{re.escape(told[0])}", said)) == others


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        ("breaks", PeerError, "rank 1 failed at 'loading the model': RuntimeError: a planted"),
        ("is-poor", ConfigError, "--max-total-tokens: .* 0 MiB are available"),
    ],
)
def test_a_rank_that_cannot_start_ends_all_with_its_own_message(tiny_model, fault, kind, told):
    ranks = Ranks(faulty(fault, 1))

    async def run():
        ranks.start(config_of(tiny_model, 2), "tcp://127.0.0.1:1")
        processes = [psutil.Process(pid) for pid in ranks.pids]
        try:
            with pytest.raises(kind, match=told):
                await ranks.ready(60)
            # The one that only missed the other comes to its end by itself.
            assert await asyncio.to_thread(gone_within, processes, 5)
        finally:
            await ranks.stop(2)

    asyncio.run(run())
