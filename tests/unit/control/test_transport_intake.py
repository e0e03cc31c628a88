"""What the link makes of requests, whatever they hold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.contract.grammar import GrammarKey, GrammarKind
from drumline.contract.messages import Submitted, decode_messages, encode_messages
from drumline.control.transport.intake import submitted
from drumline.wire.codec import MalformedFrameError, encode
from drumline.wire.request import TokenizedGenerateReqInput
from drumline.wire.sampling import SamplingParams

NUMBERS = st.floats() | st.integers(-(2**63), 2**64 - 1)
COUNTS = st.none() | st.integers(-(2**63), 2**64 - 1)


@st.composite
def requests(draw):
    """Well-formed requests with any numbers in them."""
    params = SamplingParams(
        max_new_tokens=draw(COUNTS),
        stop_token_ids=draw(st.none() | st.sets(st.integers(-5, 2**33), max_size=3)),
        temperature=draw(st.floats()),
        top_p=draw(st.floats()),
        top_k=draw(st.integers(-(2**63), 2**64 - 1)),
        repetition_penalty=draw(st.floats()),
        min_new_tokens=draw(st.integers(-(2**63), 2**64 - 1)),
        seed=draw(COUNTS),
        n=draw(st.integers(0, 2)),
        logit_bias=draw(st.none() | st.dictionaries(st.text(max_size=3), st.floats(), max_size=2)),
        is_normalized=draw(st.booleans()),
    )
    return TokenizedGenerateReqInput(
        rid=draw(st.text(min_size=1, max_size=9)),
        input_ids=draw(st.none() | st.lists(st.integers(-5, 2**31 + 5), max_size=9)),
        sampling_params=params,
        return_logprob=draw(st.booleans()),
        top_logprobs_num=draw(st.integers(-(2**63), 2**64 - 1)),
    )


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"json_schema": "{}"}, GrammarKey(GrammarKind.JSON_SCHEMA, "{}")),
        ({"regex": "a+"}, GrammarKey(GrammarKind.REGEX, "a+")),
        ({"ebnf": "root ::= x"}, GrammarKey(GrammarKind.EBNF, "root ::= x")),
        ({"structural_tag": "{}"}, GrammarKey(GrammarKind.STRUCTURAL_TAG, "{}")),
        (
            {"custom_params": {"drumline": {"choice": ["a", "b"]}, "other": 3}},
            GrammarKey(GrammarKind.CHOICE, '["a","b"]'),
        ),
        ({"custom_params": {"other": 3}}, None),
    ],
)
def test_a_grammar_arrives_by_its_kind_and_can_be_relayed(params, key):
    wire = TokenizedGenerateReqInput(
        rid="a", input_ids=[1], sampling_params=SamplingParams(**params)
    )
    message = submitted(encode(wire), 4)
    assert message.request.invalid is None
    (relayed,) = decode_messages(encode_messages((message,)))
    assert relayed.request.grammar == key


@settings(max_examples=200, deadline=None)
@given(requests())
def test_a_request_with_any_numbers_is_taken_or_refused_and_can_be_relayed(request):
    message = submitted(encode(request), 4)
    assert message.request.rid == request.rid
    (relayed,) = decode_messages(encode_messages((message,)))
    assert isinstance(relayed, Submitted)
    assert relayed.request.invalid == message.request.invalid
    assert relayed.request.sampling == message.request.sampling
    assert relayed.request.input_ids.tolist() == message.request.input_ids.tolist()
    if message.request.invalid is None:
        assert 0 <= message.request.sampling.seed < 2**63
        assert len(message.request.page_digests) == len(message.request.input_ids) // 4 * 32
        assert max(message.request.max_new_tokens or 0, message.request.top_logprobs) < 2**31


@settings(max_examples=200, deadline=None)
@given(requests(), st.data())
def test_a_damaged_request_is_taken_refused_or_no_message(request, data):
    payload = bytearray(encode(request))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = submitted(bytes(payload), 4)
    except MalformedFrameError:
        return
    assert message.request.rid


@pytest.mark.parametrize(
    ("custom", "priority"),
    [(None, 0), ({}, 0), ({"other": "x"}, 0), ({"drumline": {"priority": -3}}, -3)],
)
def test_a_priority_arrives_among_the_custom_parameters_and_can_be_relayed(custom, priority):
    params = SamplingParams(custom_params=custom)
    asked = TokenizedGenerateReqInput(rid="a", input_ids=[1], sampling_params=params)
    message = submitted(encode(asked), 4)
    (relayed,) = decode_messages(encode_messages((message,)))
    assert message.request.priority == relayed.request.priority == priority


@pytest.mark.parametrize("priority", ["high", 1.5, True, 1 << 31, None])
def test_a_priority_that_is_no_integer_is_refused_by_name(priority):
    params = SamplingParams(custom_params={"drumline": {"priority": priority}})
    asked = TokenizedGenerateReqInput(rid="a", input_ids=[1], sampling_params=params)
    assert "$.priority" in submitted(encode(asked), 4).request.invalid


def test_the_hottest_temperature_is_one_that_float32_holds():
    hottest = SamplingParams(temperature=1e308)
    asked = TokenizedGenerateReqInput(rid="a", input_ids=[1], sampling_params=hottest)
    assert np.isfinite(np.float32(submitted(encode(asked), 4).request.sampling.temperature))
