"""How requests end, on a real device: by themselves, by the clock, or by what they met."""

import math

import pytest
import torch

from drumline.contract.request import ProcessorCall, Sampling
from drumline.core.errors import ConfigError
from drumline.device.sampling import processors

from .conftest import random_model
from .small_rank import GREEDY, SmallDevice, SmallRank

POISON = 7
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 79, 32, 38, 46]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A model in which one token's embedding is no number."""
    directory = tmp_path_factory.mktemp("poisoned")
    model = random_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    model.save_pretrained(directory)
    device = SmallDevice(directory, pages=24)
    yield device
    device.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_row_without_numbers_ends_alone(poisoned, depth):
    rank = SmallRank(poisoned, depth=depth, chunk=11)
    rank.submit("before", PROMPT, GREEDY, max_new_tokens=20)
    rank.finish()
    for i in range(3):
        rank.submit(f"well{i}", PROMPT[i:], GREEDY, max_new_tokens=20)
        wants = {"return_logprob": True, "prompt_logprobs_from": 0}
        rank.submit(f"ill{i}", [*PROMPT[: 4 * i], POISON, *PROMPT], Sampling(seed=i), **wants)
    rank.finish()
    for i in range(3):
        told = rank.answer(f"ill{i}")
        assert (told.finished, told.ids, told.prompt) == ("abort", [], None)
        assert told.details["err_type"] == 523
        assert told.details["status_code"] == 500
        assert len(rank.answer(f"well{i}").ids) == 20
    assert rank.answer("well0").ids == rank.answer("before").ids
    # Their blocks are others' by now.
    for i in range(6):
        rank.submit(f"after{i}", [i, *PROMPT, *PROMPT], GREEDY, max_new_tokens=20)
    rank.finish()
    assert all(rank.answer(f"after{i}").finished == "length" for i in range(6))


@pytest.fixture(scope="module")
def device(checkpoint):
    made = SmallDevice(checkpoint("llama")[1])
    yield made
    made.close()


def test_an_answer_ends_with_any_of_its_ends_and_says_with_which(device):
    rank = SmallRank(device)
    rank.submit("free", PROMPT, Sampling(seed=1), max_new_tokens=30)
    rank.finish()
    free = rank.answer("free").ids
    ends = [token for token in dict.fromkeys(free) if token not in free[:4]]
    rank.submit("two", PROMPT, Sampling(seed=1), max_new_tokens=30, stop_token_ids=tuple(ends[:2]))
    rank.submit(
        "late", PROMPT, Sampling(seed=1), max_new_tokens=30, stop_token_ids=(free[0], 319),
        min_new_tokens=3,
    )  # fmt: skip
    rank.finish()
    told = rank.answer("two")
    assert (told.finished, told.details) == ("stop", {"type": "stop", "matched": ends[0]})
    assert told.ids == free[: free.index(ends[0]) + 1]
    assert free[0] not in rank.answer("late").ids[:3]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_deadline_is_counted_on_the_relayed_clock(device, depth):
    rank = SmallRank(device, depth=depth)
    rank.submit("late", PROMPT, GREEDY, max_new_tokens=200, deadline_us=10_000, stream=True)
    rank.submit("free", PROMPT, GREEDY, max_new_tokens=20)
    rank.submit("soon", PROMPT, GREEDY, max_new_tokens=3, deadline_us=10_000)
    rank.run(9)
    assert "late" in rank.frontend.live
    rank.run(4)
    told = rank.answer("late")
    assert (told.finished, told.details["status_code"]) == ("abort", 408)
    assert "deadline" in told.details["message"]
    assert 5 < len(told.ids) < 15
    rank.finish()
    assert rank.answer("soon").finished == rank.answer("free").finished == "length"
    rank.submit("late", PROMPT, GREEDY, max_new_tokens=20)  # the old clock is not this one's
    rank.finish()
    assert rank.answer("late").finished == "length"


def test_a_request_that_forbids_every_token_ends_with_the_reason(device):
    rank = SmallRank(device)
    rank.submit("stuck", PROMPT, Sampling(allowed_ids=(5, 6), bad_words=((5,), (6,))))
    rank.submit("free", PROMPT, Sampling(allowed_ids=(5, 6), bad_words=((5,), (6, 5))))
    rank.finish()
    told = rank.answer("stuck")
    assert (told.finished, told.details["status_code"]) == ("abort", 400)
    assert "no token is left" in told.details["message"]
    assert rank.answer("free").ids == [6] * 8


def test_salted_requests_share_prefixes_with_their_like_alone(device):
    rank = SmallRank(device)
    long = PROMPT * 2
    for rid, salt in (("a", ""), ("b", "x"), ("c", "x"), ("d", "y")):
        rank.submit(rid, long, GREEDY, cache_salt=salt)
        rank.finish()
    assert [rank.answer(rid).cached_tokens >= 32 for rid in "abcd"] == [False, False, True, False]


class Favour:
    """Lets one token alone through; in its way, or at once."""

    def __init__(self, vocab):
        self.vocab = vocab

    def process(self, logits, rows):
        for row, asked in zip(logits, rows, strict=True):
            if asked.params["token"] >= self.vocab:
                raise ValueError("no such token")
            row.fill_(-math.inf)
            row[asked.params["token"] + len(asked.answer)] = asked.prompt[0]


class Entry:
    def __init__(self, name, made):
        self.name, self.value, self._made = name, f"tests:{name}", made

    def load(self):
        return self._made


@pytest.fixture
def registered(monkeypatch):
    def broken(vocab):
        raise RuntimeError("broken")

    entries = [Entry("favour", Favour), Entry("broken", broken)]
    monkeypatch.setattr(processors, "entry_points", lambda group: entries)


def test_a_registered_processor_serves_the_rows_that_name_it(checkpoint, registered):
    device = SmallDevice(checkpoint("llama")[1], model={"logits_processors": ("favour",)})
    rank = SmallRank(device)
    call = ProcessorCall("favour", {"token": 20})
    rank.submit("plain", PROMPT, GREEDY)
    rank.finish()
    rank.submit("a", PROMPT, Sampling(seed=1), processors=(call,))
    rank.submit("ill", PROMPT, GREEDY, processors=(ProcessorCall("favour", {"token": 999}),))
    rank.submit("b", PROMPT, GREEDY, processors=(ProcessorCall("favour", {"token": 99}),))
    rank.submit("other", PROMPT, GREEDY, processors=(ProcessorCall("unknown"),))
    rank.submit("beside", PROMPT, GREEDY)
    rank.finish()
    assert rank.answer("beside").ids == rank.answer("plain").ids
    assert rank.answer("a").ids == list(range(20, 28))
    assert rank.answer("b").ids == list(range(99, 107))
    assert (rank.answer("ill").finished, rank.answer("ill").details["status_code"]) == (
        "abort",
        500,
    )
    assert "'unknown' is not loaded here; favour is" in rank.answer("other").details["message"]
    device.close()


@pytest.mark.parametrize(
    ("name", "why"),
    [("missing", "'missing' is not registered .* broken, favour is"), ("broken", "does not load")],
)
def test_a_processor_that_cannot_be_had_is_refused_at_the_start(checkpoint, registered, name, why):
    with pytest.raises(ConfigError, match=f"--logits-processors: .*{why}"):
        SmallDevice(checkpoint("llama")[1], model={"logits_processors": (name,)})
