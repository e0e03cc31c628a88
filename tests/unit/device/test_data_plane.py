"""The data plane carries plans out in order, on its own thread, on values nobody else changes."""

import threading

import msgspec
import numpy as np
import pytest
import torch

from drumline.contract.cache import BlockMoves
from drumline.contract.plan import PageZeroes, TablePatch
from drumline.contract.ports import Dispatch, LogprobPlan
from drumline.contract.request import Sampling
from drumline.core.errors import InvariantError

from .conftest import ints

RANDOM = np.random.default_rng(21)
PROMPTS = [RANDOM.integers(0, 320, length).tolist() for length in (40, 23, 57, 9)]


def patch(rows, columns, blocks):
    return TablePatch(0, ints(*rows), ints(*columns), ints(*blocks))


def transformers_ids(model, prompt, count):
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat((ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)), 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "mistral, window", "qwen3"])
def test_greedy_ids_are_those_of_transformers_one_forward_ahead(rig, checkpoint, family):
    device = rig(family)
    for row, prompt in enumerate(PROMPTS, 1):
        expected = transformers_ids(checkpoint(family)[0], prompt, 20)
        assert device.generate(row, f"r{row}", prompt, 20, chunk=16) == expected
        device.plane.release([f"r{row}"])


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_rows_that_come_and_go_say_what_they_say_alone(rig, depth):
    device = rig("llama")
    alone = [
        device.generate(1, f"alone{i}", prompt, 12, blocks=range(1, 9))
        for i, prompt in enumerate(PROMPTS)
    ]
    device.rows.clear()
    texts = {row: [] for row in range(1, 5)}
    asked = dict.fromkeys(texts, 0)
    in_flight = []
    for step in range(30):
        parts = {}
        if step % 3 == 0 and (row := step // 3 + 1) in texts:
            parts = device.start(row, f"r{row}", PROMPTS[row - 1])
        decodes = [row for row, count in asked.items() if 0 < count < 12]
        extends = [(row, 25) for row, (prompt, done) in device.rows.items() if done < len(prompt)]
        plan = device.plan(extends, decodes, **parts)
        for row in decodes + [row for row, _ in extends]:
            asked[row] += device.rows[row][1] >= len(PROMPTS[row - 1])
        in_flight.append((plan, device.execute(plan)))
        while len(in_flight) > (depth if plan.batch else 0):
            done, ticket = in_flight.pop(0)
            if ticket is not None:
                result = device.plane.complete(ticket)
                rows = np.repeat(done.batch.rows, result.counts)
                for row, token in zip(rows.tolist(), result.tokens.tolist(), strict=True):
                    texts[row].append(token)
    assert list(texts.values()) == alone


@pytest.fixture
def held(rig):
    """A device whose forward thread waits until `go` is set, with one request that decodes."""
    device = rig("llama")
    parts = device.start(1, "first", PROMPTS[0], blocks=range(1, 9))
    device.run(device.plan([(1, 100)], **parts))
    go = threading.Event()
    device.thread.submit(lambda: go.wait(60) or None)
    yield device, go
    go.set()


def test_a_later_plan_s_edits_are_invisible_to_a_forward_queued_before(held, rig):
    device, go = held
    expected = rig("llama").generate(1, "alone", PROMPTS[0], 4)
    queued = [device.execute(device.plan(decodes=[1])) for _ in range(3)]
    # A slid window: the first blocks now name others. A private copy onto the row's own block,
    # and blank pages where it still reads. An abort whose row somebody else gets at once.
    device.execute(device.plan(patches=(patch([1, 1], [0, 1], [30, 31]),)))
    device.execute(device.plan(copies=(BlockMoves(0, ints(31), ints(2)),)))
    device.execute(device.plan(zeroes=(PageZeroes(0, ints(1, 2, 3)),)))
    device.plane.release(["first"])
    parts = device.start(1, "second", PROMPTS[1], Sampling(seed=4), blocks=range(40, 48))
    last = device.execute(device.plan([(1, 100)], **parts))
    go.set()
    tokens = [device.plane.complete(ticket).tokens.item() for ticket in queued]
    assert tokens == expected[1:]
    assert len(device.plane.complete(last).tokens) == 1


def test_a_private_copy_carries_a_shared_prefix(rig):
    device = rig("llama")
    prompt = PROMPTS[2]
    expected = device.generate(1, "a", prompt, 6, blocks=range(1, 9))
    # Another request reads two blocks of it and gets a copy of the third, of which it reads half.
    parts = device.start(2, "b", prompt, blocks=[1, 2, 20, 21, 22, 23])
    device.rows[2][1] = 40
    parts["copies"] = (BlockMoves(0, ints(3), ints(20)),)
    # The copy's source is given away and blanked in the same plan.
    parts["zeroes"] = (PageZeroes(0, ints(3, 21, 22)),)
    tokens = [device.run(device.plan([(2, 100)], **parts)).tokens.item()]
    tokens += [device.run(device.plan(decodes=[2])).tokens.item() for _ in range(5)]
    assert tokens == expected


def test_decode_ids_replace_the_token_sampled_last(rig):
    device = rig("llama")
    expected = device.generate(1, "a", PROMPTS[1], 3, blocks=range(1, 9))
    other = [*PROMPTS[1], 5]
    follows = device.generate(2, "b", other, 1, blocks=range(9, 17))
    parts = device.start(3, "c", PROMPTS[1], blocks=range(17, 25))
    device.run(device.plan([(3, 100)], **parts))
    plan = device.plan(decodes=[3])
    for named, token in ((-1, expected[1]), (5, follows[0])):
        batch = msgspec.structs.replace(plan.batch, decode_ids=ints(named))
        assert device.run(msgspec.structs.replace(plan, batch=batch)).tokens.item() == token


def test_results_are_ragged_and_log_probabilities_follow_batch_indices(rig):
    device = rig("llama")
    decoding = device.start(1, "a", PROMPTS[1])
    device.run(device.plan([(1, 100)], **decoding))
    ending, cut = device.start(2, "b", PROMPTS[3]), device.start(3, "c", PROMPTS[2])
    plan = device.plan(
        [(2, 100), (3, 20)],
        [1],
        bound=ending["bound"] + cut["bound"],
        patches=ending["patches"] + cut["patches"],
    )
    result = device.run(plan, LogprobPlan(ints(0, 1, 2), ints(2, 2, 0)))
    assert result.counts.tolist() == [1, 0, 1]
    assert len(result.tokens) == 2
    assert (result.tokens.dtype, result.counts.dtype) == (np.int32, np.int32)
    ended, cut_short, decoded = result.logprobs
    assert (ended.index, cut_short.index, decoded.index) == (0, 1, 2)
    assert ended.top_ids[0][0] == result.tokens[0]
    assert ended.top_values[0][0] == ended.sampled[0] <= 0
    assert cut_short.sampled == ()
    assert len(decoded.sampled) == 1
    only_chunks = device.run(device.plan([(3, 20)]), LogprobPlan(ints(0), ints(1)))
    assert only_chunks.counts.tolist() == [0]
    assert only_chunks.logprobs[0].sampled == ()


def test_rows_of_a_poisoned_cache_are_flagged_and_spare_their_neighbours(rig):
    device = rig("llama")
    for row in (1, 2, 3):
        device.run(device.plan([(row, 100)], **device.start(row, f"r{row}", PROMPTS[row])))
    pool = device.built.handle._pool
    device.thread.call(lambda: pool.values[1].numbers[9].fill_(torch.nan))
    # A neighbour's table still names the block, beyond what the neighbour has written.
    stale = patch([1], [3], [9])
    result = device.run(device.plan(decodes=[1, 2, 3], patches=(stale,)))
    assert result.nan_indices.tolist() == [1]
    assert result.nan_indices.dtype == np.int32


def test_a_plan_without_a_batch_has_no_ticket(rig):
    device = rig("llama")
    assert device.execute(device.plan(zeroes=(PageZeroes(0, ints(1)),))) is None


def test_tickets_are_completed_in_order_and_once(rig):
    device = rig("llama")
    first = device.execute(device.plan([(1, 5)], **device.start(1, "a", PROMPTS[0])))
    second = device.execute(device.plan([(1, 5)]))
    with pytest.raises(InvariantError, match="not the next one open"):
        device.plane.complete(second)
    device.plane.complete(first)
    device.plane.complete(second)
    with pytest.raises(InvariantError, match="not the next one open"):
        device.plane.complete(second)


def test_completing_a_forward_does_not_wait_for_what_is_queued_behind_it(rig):
    device = rig("llama")
    ticket = device.execute(device.plan([(1, 5)], **device.start(1, "a", PROMPTS[0])))
    go = threading.Event()
    device.thread.submit(lambda: go.wait(60))
    behind = device.execute(device.plan([(1, 5)]))
    assert device.plane.complete(ticket).counts.tolist() == [0]
    go.set()
    device.plane.complete(behind)


def test_a_failure_on_the_forward_thread_ends_every_later_operation(rig, caplog):
    device = rig("llama")
    fine = device.execute(device.plan([(1, 5)], **device.start(1, "b", PROMPTS[0])))
    bad = device.start(2, "a", [400, 401])
    failing = device.execute(device.plan([(2, 5)], **bad))
    queued = device.execute(device.plan([(1, 5)]))
    device.plane.complete(fine)
    for ticket in (failing, queued):
        with pytest.raises(InvariantError, match="the forward thread failed: IndexError") as caught:
            device.plane.complete(ticket)
        assert isinstance(caught.value.__cause__, IndexError)
    for operation in (
        lambda: device.plane.admit([]),
        lambda: device.plane.execute(device.plan(), Dispatch()),
        lambda: device.plane.release(["a"]),
    ):
        with pytest.raises(InvariantError, match="the forward thread failed: IndexError"):
            operation()
    assert "the forward thread failed" in caplog.text


def test_requests_with_seeds_are_reproducible_and_chunking_does_not_matter(rig):
    device = rig("qwen2")
    way = Sampling(seed=9, temperature=1.3, top_p=0.95, top_k=50)
    texts = [
        device.generate(
            1, f"r{chunk}", PROMPTS[2], 15, chunk=chunk, sampling=way, blocks=range(1, 9)
        )
        for chunk in (100, 16, 7)
    ]
    assert texts[0] == texts[1] == texts[2]
    other = Sampling(seed=10, temperature=1.3, top_p=0.95, top_k=50)
    assert texts[0] != device.generate(2, "x", PROMPTS[2], 15, sampling=other, blocks=range(9, 17))
