"""Engines of several rank processes give the answers of one."""

import asyncio
import random

import pytest
from tests.e2e.engines import gathered, running

from drumline.bench.traces import files_of, merge

LAYOUTS = [(2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2)]
"""Ranks of a stage, replicas, and stages."""
NEAR_TIE = 1e-3


def mixed_requests():
    """Return 50 requests: short and long, some with a common head, longer than a chunk too."""
    rng = random.Random(5)
    heads = [[rng.randrange(512) for _ in range(80)] for _ in range(3)]
    asked = []
    for _ in range(50):
        head = rng.choice(heads)[: rng.choice((0, 0, 30, 80))]
        tail = [rng.randrange(512) for _ in range(rng.randint(1, 90))]
        asked.append((head + tail, rng.randint(1, 24)))
    return asked


@pytest.fixture(scope="module")
def alone(tiny_model):
    """Return what one rank answers, with its margins."""

    async def ask():
        async with running(tiny_model) as engine:
            return await gathered(engine, mixed_requests(), top=2)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("layout", "suspend_every"),
    [*((layout, 0) for layout in LAYOUTS), ((2, 1, 1), 9), ((1, 1, 2), 9)],
)
def test_several_ranks_give_the_greedy_tokens_of_one(tiny_model, alone, layout, suspend_every):
    async def ask():
        async with running(tiny_model, *layout, suspend_every=suspend_every) as engine:
            return await gathered(engine, mixed_requests())

    answers = asyncio.run(ask())
    cut = 0
    for (mine, _), (ids, margins) in zip(answers, alone, strict=True):
        tie = next((at for at, margin in enumerate(margins) if margin < NEAR_TIE), None)
        cut += tie is not None
        assert mine[:tie] == ids[:tie]
        assert len(mine) == len(ids)
    assert cut <= 0.02 * len(alone)


@pytest.mark.parametrize(("tensor", "data", "pipeline"), [(2, 2, 1), (1, 1, 2)])
def test_all_ranks_give_memory_back_load_other_weights_and_record_what_they_do_together(
    tiny_model, tensor, data, pipeline, tmp_path
):
    async def asked():
        async with running(tiny_model, tensor, data, pipeline) as engine:

            async def done(method, *args):
                replies = await engine.client.call(method, *args, timeout_s=60)
                assert all(reply.success for reply in replies), replies
                return [reply.message for reply in replies]

            before = [
                await engine.tokens(f"a{rank}", [5, 6, 7], 6, rank=rank) for rank in range(data)
            ]
            await done("release_memory_occupation")
            assert await done("is_sleeping") == ["true"] * data
            await done("resume_memory_occupation")
            await done("update_weight_from_disk", str(tiny_model), None, "again")
            assert await done("get_weight_version") == ["again"] * data
            after = [
                await engine.tokens(f"b{rank}", [5, 6, 7], 6, rank=rank) for rank in range(data)
            ]
            assert after == before
            await done("release_memory_occupation", None, True)
            await done("resume_memory_occupation")
            assert await done("is_unloaded") == ["true"] * data
            await done("update_weight_from_disk", str(tiny_model))
            assert await done("is_unloaded") == ["false"] * data
            how = {"profile_id": "p", "output_dir": str(tmp_path), "with_stack": False}
            await done("start_profile", how)
            asking = [engine.tokens(f"c{rank}", [5, 6, 7], 6, rank=rank) for rank in range(data)]
            assert await asyncio.gather(*asking) == before
            await done("stop_profile")

    asyncio.run(asked())
    told = merge(files_of([str(tmp_path)]), tmp_path / "merged")
    assert [one.rank for one in told] == [
        (f"DP{replica}-" if data > 1 else "")
        + (f"PP{stage}-" if pipeline > 1 else "")
        + f"TP{place}"
        for replica in range(data)
        for stage in range(pipeline)
        for place in range(tensor)
    ]
    for one in told:
        assert one.forwards >= 6
        assert one.host_us > 0
