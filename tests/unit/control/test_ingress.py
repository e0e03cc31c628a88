import re

import numpy as np
import pytest

from drumline.contract.request import GenerateRequest, ProcessorCall, Sampling
from drumline.control.ingress import Ingress, Limits
from drumline.control.requests import Admitted, Reason, Refusal

LIMITS = Limits(vocab_size=100, context_tokens=64, pool_tokens=48, eos_token_ids=(2,))


def asked(prompt=4, **fields):
    sampling = Sampling(**fields.pop("sampling", {}))
    ids = np.arange(prompt, dtype=np.int32)
    return GenerateRequest(**{"rid": "r", "input_ids": ids, "sampling": sampling, **fields})


def admit(request, limits=LIMITS):
    return Ingress(limits).admit(request, 7)


def test_an_admitted_request_carries_its_budget_to_scheduler_and_data_plane():
    admitted = admit(asked(4, max_new_tokens=10, stop_token_ids=(5,), page_digests=b"d" * 32))
    assert isinstance(admitted, Admitted)
    assert admitted.request.limit == admitted.spec.max_new_tokens == 10
    assert admitted.request.stops == {2, 5}
    assert admitted.request.arrived_us == 7
    assert admitted.admission.stop_token_ids == (2, 5)
    assert admitted.spec.page_digests == b"d" * 32
    assert admit(asked(4, priority=3)).spec.priority == 3


def test_nothing_cached_reaches_past_the_first_position_that_is_told_of():
    assert admit(asked(9, prompt_logprobs_from=5)).spec.max_cached_prefix_tokens == 5
    assert admit(asked(9)).spec.max_cached_prefix_tokens > 9
    assert admit(asked(9, cache_salt="x")).spec.cache_salt == "x"


@pytest.mark.parametrize(
    ("fields", "read"),
    [
        ({}, False),
        ({"sampling": {"repetition_penalty": 1.1}}, True),
        ({"sampling": {"frequency_penalty": 1.1}}, False),
        ({"sampling": {"bad_words": ((1,),)}}, False),
        ({"sampling": {"bad_words": ((1,), (1, 2))}}, True),
        ({"prompt_logprobs_from": 0}, True),
    ],
)
def test_the_data_plane_learns_prompts_that_something_reads(fields, read):
    assert admit(asked(4, **fields)).admission.prompt_ids.tolist() == ([0, 1, 2, 3] if read else [])


def test_without_a_bound_the_budget_is_the_rest_of_the_context():
    limits = Limits(vocab_size=100, context_tokens=64, pool_tokens=1000, eos_token_ids=(2,))
    assert admit(asked(4), limits).request.limit == 60


def test_a_budget_beyond_context_or_pool_is_clipped():
    assert admit(asked(4, max_new_tokens=1000)).request.limit == 44


def test_ignoring_eos_leaves_only_the_requests_own_stop_ids():
    assert admit(asked(ignore_eos=True, stop_token_ids=(9,))).request.stops == {9}


def test_a_stop_id_the_model_cannot_produce_is_left_out():
    assert admit(asked(stop_token_ids=(-1, 100, 99))).request.stops == {2, 99}


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (asked(invalid="the frame has no input_ids"), "the frame has no input_ids"),
        (asked(rid=""), "rid must not be empty"),
        (asked(0), "input_ids must not be empty"),
        (asked(input_ids=np.array([1, 100], np.int32)), r"input_ids\[1\] is 100; .* 0 to 99"),
        (asked(input_ids=np.array([-1, 100], np.int32)), r"input_ids\[0\] is -1"),
        (asked(logprob_ids=(3, 100)), "token_ids_logprob names id 100; .* 0 to 99"),
        (asked(logprob_ids=(3,) * 129), "token_ids_logprob has 129 ids; 128 are allowed"),
        (asked(prompt_logprobs_from=4), "logprob_start_len is 4; .* prompt of 4 tokens"),
        (asked(sampling={"typical_p": 0.0}), "typical_p is 0.0; it must be above 0"),
        (asked(sampling={"allowed_ids": (100,)}), "allowed_ids names id 100"),
        (asked(sampling={"bad_words": ((1, 100),)}), "bad_words names id 100"),
        (asked(sampling={"bad_words": ((1,) * 33,)}), "bad_words has one of 33 tokens"),
        (asked(processors=(ProcessorCall("favour"),)), "'favour' is not loaded here; none is"),
        (asked(64), "64 tokens, but the context holds 64"),
        (asked(50), "50 tokens, but the KV pool holds 48"),
        (asked(max_new_tokens=0), "max_new_tokens is 0"),
        (asked(max_new_tokens=2, min_new_tokens=3), r"min_new_tokens \(3\) is above"),
        (asked(min_new_tokens=-1), "min_new_tokens is -1"),
        (asked(top_logprobs=21), "top_logprobs is 21"),
        (asked(sampling={"temperature": -0.5}), "temperature is -0.5"),
        (asked(sampling={"temperature": float("nan")}), "temperature is nan"),
        (asked(sampling={"top_p": 0.0}), "top_p is 0.0"),
        (asked(sampling={"top_p": float("nan")}), "top_p is nan"),
        (asked(sampling={"min_p": 1.5}), "min_p is 1.5"),
        (asked(sampling={"top_k": 0}), "top_k is 0"),
        (asked(sampling={"frequency_penalty": 3.0}), "frequency_penalty is 3.0"),
        (asked(sampling={"presence_penalty": -3.0}), "presence_penalty is -3.0"),
        (asked(sampling={"repetition_penalty": 0.0}), "repetition_penalty is 0.0"),
        (asked(sampling={"logit_bias": {100: 1.0}}), "logit_bias names id 100"),
        (asked(sampling={"logit_bias": {1: float("inf")}}), "logit_bias of id 1 is inf"),
    ],
)
def test_a_refusal_says_what_was_wrong(request_, said):
    refusal = admit(request_)
    assert isinstance(refusal, Refusal)
    assert refusal.ending.reason is Reason.ABORT
    assert refusal.ending.status == 400
    assert re.search(said, refusal.ending.message)
