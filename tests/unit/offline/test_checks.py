"""What a program asks for is checked by type, and named where it is wrong."""

import pytest

from drumline.core.errors import PeerError, RequestError
from drumline.offline.llm import _is_one, _LoopThread
from drumline.offline.sampling import SamplingParams, fields_of


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("n", "2"),
        ("seed", "a"),
        ("top_k", 1.5),
        ("stop", 5),
        ("stop_token_ids", "abc"),
        ("logit_bias", {5: "x"}),
        ("ignore_eos", 1),
    ],
)
def test_a_field_of_the_wrong_type_is_named(name, value):
    with pytest.raises(RequestError, match=rf"^{name}") as refused:
        fields_of(SamplingParams(**{name: value}))
    assert refused.value.param.startswith(name)


def test_what_is_no_sampling_params_is_refused():
    with pytest.raises(RequestError, match="not dict"):
        fields_of({"temperature": 0})


def test_every_field_reaches_the_checks_of_the_http_side():
    asked = SamplingParams(temperature=0, logit_bias={5: 1.0}, stop=["a"], min_tokens=2)
    fields = fields_of(asked)
    for name in SamplingParams.__struct_fields__:
        if name not in {"logit_bias", "max_tokens", "logprobs", "prompt_logprobs"}:
            assert getattr(fields, name) == getattr(asked, name), name
    assert fields.logit_bias == {"5": 1.0}


@pytest.mark.parametrize("prompts", [None, 5, b"abc", {"prompt": "a"}, iter(["a"])])
def test_what_is_no_prompt_is_refused_by_its_type(prompts):
    with pytest.raises(RequestError, match=type(prompts).__name__):
        _is_one(prompts)


def test_a_thread_that_ended_says_that_the_engine_was_closed():
    async def answer():
        return 7

    thread = _LoopThread()
    assert thread.run(answer()) == 7
    thread.stop()
    with pytest.raises(PeerError, match="closed"):
        thread.run(answer())
