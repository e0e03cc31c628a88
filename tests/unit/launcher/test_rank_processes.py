"""The launcher's view of its ranks, with scripted processes in their place."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from drumline.core.config import Config, ParallelConfig
from drumline.core.errors import ConfigError, PeerError
from drumline.launcher import rank_process
from drumline.launcher.rank_process import Ahead
from drumline.launcher.ranks import Ranks

SCRIPT = Path(__file__).with_name("scripted_rank.py")


def scripted(*steps: str, on_step=None) -> Ranks:
    return Ranks((sys.executable, str(SCRIPT), *steps), on_step)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_of(count: int) -> Config:
    return Config(parallel=ParallelConfig(data_parallel_size=count))


async def started(ranks: Ranks, count: int = 1):
    ranks.start(ranks_of(count), "tcp://127.0.0.1:1")
    return await ranks.ready(10)


async def refused(*steps: str, timeout_s: float = 10) -> Exception:
    ranks = scripted(*steps)
    ranks.start(Config(), "tcp://127.0.0.1:1")
    try:
        with pytest.raises((ConfigError, PeerError)) as caught:
            await ranks.ready(timeout_s)
    finally:
        await ranks.stop(1)
    assert not any(map(alive, ranks.pids))
    return caught.value


def test_ranks_start_together_and_say_what_they_are():
    async def run():
        steps = []
        ranks = scripted(
            "step:weights", "ready", "serve", on_step=lambda rank, step: steps.append((rank, step))
        )
        ready = await started(ranks, count=2)
        assert [one.summary for one in ready] == [
            "rank 0 of tcp://127.0.0.1:1",
            "rank 1 of tcp://127.0.0.1:1",
        ]
        assert sorted(steps) == [(0, "weights"), (1, "weights")]
        await asyncio.gather(ranks.stop(), ranks.stop())
        assert not any(map(alive, ranks.pids))

    asyncio.run(run())


@pytest.fixture
def scripted_ahead(monkeypatch):
    monkeypatch.setattr(
        rank_process, "RANK_COMMAND", (sys.executable, str(SCRIPT), "ready", "serve")
    )


def test_a_rank_that_was_started_ahead_is_the_lone_rank(scripted_ahead):
    async def run(ahead):
        ranks = Ranks(("no such command",), ahead=ahead)
        (ready,) = await started(ranks)
        assert ready.summary == "rank 0 of tcp://127.0.0.1:1"
        assert ahead.take() is None
        await ranks.stop()
        assert not any(map(alive, ranks.pids))

    with Ahead() as ahead:
        asyncio.run(run(ahead))


def test_ranks_that_meet_take_none_that_was_started_ahead(scripted_ahead):
    async def run(ahead):
        ranks = Ranks((sys.executable, str(SCRIPT), "ready", "serve"), ahead=ahead)
        await started(ranks, count=2)
        left = ahead.take()
        assert left.process.pid not in ranks.pids
        await ranks.stop()
        return left

    with Ahead() as ahead:
        left = asyncio.run(run(ahead))
        left.process.kill()
        left.process.communicate()
        os.close(left.read_fd)


def test_a_rank_that_nobody_takes_ends_with_who_started_it(scripted_ahead):
    with Ahead() as ahead:
        pid = ahead._started.process.pid
        assert alive(pid)
    assert not alive(pid)


def test_ranks_get_sleeping_threads_and_huge_pages_unless_the_environment_says(monkeypatch):
    async def run():
        ranks = scripted("ready", "serve")
        await started(ranks)
        environment = psutil.Process(ranks.pids[0]).environ()
        await ranks.stop()
        return environment

    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    chosen = asyncio.run(run())
    assert (chosen["OMP_WAIT_POLICY"], chosen["THP_MEM_ALLOC_ENABLE"]) == ("PASSIVE", "1")
    monkeypatch.setenv("GOMP_SPINCOUNT", "100")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    said = asyncio.run(run())
    assert "OMP_WAIT_POLICY" not in said
    assert said["THP_MEM_ALLOC_ENABLE"] == "0"


def test_what_the_operator_can_mend_is_a_config_error():
    error = asyncio.run(refused("fail:2:--model:no such file", "exit:2"))
    assert isinstance(error, ConfigError)
    assert str(error) == "--model: no such file"


def test_a_failure_names_rank_step_and_reason():
    error = asyncio.run(refused("fail:1::out of memory", "exit:1"))
    assert str(error) == "rank 0 failed at 'weights': out of memory"


def test_a_silent_death_names_the_step_and_the_status():
    error = asyncio.run(refused("step:weights", "exit:3"))
    assert "rank 0 ended with status 3 at 'weights'" in str(error)


def test_a_kill_names_the_signal():
    error = asyncio.run(refused("step:weights", "kill"))
    assert "rank 0 was killed by SIGKILL at 'weights'" in str(error)


def test_start_up_is_bounded_and_names_where_it_stood():
    error = asyncio.run(refused("step:weights", "serve", timeout_s=1.5))
    assert "rank 0 is not ready after 1.5 s, it is at 'weights'" in str(error)


def test_a_rank_that_ends_after_its_own_report_fails_the_start_of_the_others():
    async def run():
        ranks = scripted("ready-if:0", "serve-if:1")
        ranks.start(ranks_of(2), "tcp://127.0.0.1:1")
        with pytest.raises(PeerError, match="rank 0 ended with status 0 while serving"):
            await ranks.ready(10)
        await ranks.stop(1)

    asyncio.run(run())


def test_start_up_names_the_rank_that_came_the_least_far():
    async def run():
        ranks = scripted("step:weights", "step-if:0", "serve")
        ranks.start(ranks_of(2), "tcp://127.0.0.1:1")
        with pytest.raises(PeerError, match="rank 1 is not ready after 2 s, it is at 'weights'"):
            await ranks.ready(2)
        await ranks.stop(1)

    asyncio.run(run())


def test_the_rank_whose_end_is_the_cause_is_named_and_not_one_that_missed_it():
    async def run():
        # The second rank is gone before the first one says so.
        ranks = scripted("ready", "sleep:0.7", "kill-if:1", "sleep:0.3", "peer-gone", "exit:1")
        await started(ranks, count=2)
        error = await asyncio.wait_for(ranks.lost(), 5)
        await asyncio.sleep(0.5)
        assert "rank 1 was killed by SIGKILL while serving" in str(error)
        assert "rank 1 was killed" in str(await ranks.lost()), "also when the first rank is over"
        await ranks.stop(1)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (("ready", "sleep:0.5", "exit:0"), None),
        (
            ("ready", "sleep:0.5", "serve-if:0", "exit:3"),
            "rank 1 ended with status 3 while serving",
        ),
        (("ready", "sleep:0.5", "peer-gone-if:0", "sleep:0.3", "exit:0"), "rank 0 failed"),
    ],
)
def test_ranks_that_end_by_themselves_end_well_unless_one_of_them_did_not(
    script, told, monkeypatch
):
    monkeypatch.setattr("drumline.launcher.ranks._TOGETHER_S", 1.0)

    async def run():
        ranks = scripted(*script)
        await started(ranks, count=2)
        error = await asyncio.wait_for(ranks.over(), 5)
        await ranks.stop(1)
        return error

    error = asyncio.run(run())
    assert (error is None) == (told is None)
    assert (told or "") in str(error)


def test_ranks_meet_at_one_address_that_only_the_first_holds():
    async def run():
        ranks = scripted("meeting", "ready", "serve")
        told = [ready.summary for ready in await started(ranks, count=2)]
        await ranks.stop(1)
        return told

    first, second = (line.split() for line in asyncio.run(run()))
    assert first[:2] == second[:2], "address and token"
    assert (first[2], second[2]) == ("listens", "dials")


def test_an_address_that_is_taken_is_refused_by_its_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        config = Config(parallel=ParallelConfig(data_parallel_size=2, dist_init_addr=address))

        async def run():
            with pytest.raises(ConfigError, match="--dist-init-addr: cannot listen"):
                Ranks().start(config, "tcp://127.0.0.1:1")

        asyncio.run(run())


def test_a_death_while_serving_is_noticed_at_once():
    async def run():
        ranks = scripted("ready", "serve")
        await started(ranks)
        lost = asyncio.create_task(ranks.lost())
        await asyncio.sleep(0)
        os.kill(ranks.pids[0], signal.SIGKILL)
        error = await asyncio.wait_for(lost, 2)
        assert "was killed by SIGKILL while serving" in str(error)
        await ranks.stop(1)

    asyncio.run(run())


def test_a_rank_that_does_not_stop_is_killed():
    async def run():
        ranks = scripted("deaf", "ready", "sleep:30")
        await started(ranks)
        began = time.perf_counter()
        await ranks.stop(0.3)
        assert time.perf_counter() - began < 2
        assert not any(map(alive, ranks.pids))

    asyncio.run(run())


def test_a_rank_that_comes_further_while_it_stops_is_waited_for():
    async def run(*steps):
        ranks = scripted("deaf", "ready", *steps)
        await started(ranks)
        await ranks.stop(0.8)
        return ranks._ranks[0].process.returncode

    past_its_forward = ("sleep:0.5", "step:finishing", "sleep:0.7", "exit:0")
    assert asyncio.run(run(*past_its_forward)) == 0
    assert asyncio.run(run("sleep:1.5", "exit:0")) == -signal.SIGKILL


def test_a_rank_is_killed_once(caplog):
    async def run():
        ranks = scripted("deaf", "ready", "sleep:30")
        await started(ranks)
        ranks.kill()
        ranks.kill()
        await ranks.stop(0)

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert [line.message.split(" (")[0] for line in caplog.records] == ["killing rank 0"]


PARENT = """
import asyncio, sys, time
from drumline.core.config import Config
from drumline.launcher import rank_process
from drumline.launcher.rank_process import Ahead
from drumline.launcher.ranks import Ranks

async def run():
    ranks = Ranks((sys.executable, *sys.argv[1:]))
    ranks.start(Config(), "tcp://127.0.0.1:1")
    await ranks.ready(10)
    print(ranks.pids[0], flush=True)
    await asyncio.sleep(30)

asyncio.run(run())
"""


@pytest.mark.parametrize("steps", [("ready", "serve"), ("deaf", "ready", "sleep:30")])
def test_a_killed_launcher_takes_its_ranks_with_it(steps):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(SCRIPT), *steps], stdout=subprocess.PIPE, text=True
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    deadline = time.perf_counter() + 2
    while alive(pid) and time.perf_counter() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
