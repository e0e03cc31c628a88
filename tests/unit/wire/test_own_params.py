"""What travels beside the wire's own places is one struct, checked as it is read."""

import msgspec
import pytest

from drumline.wire.own_params import NAME, OwnParams, own_params


def test_every_field_is_read_and_what_is_not_ours_is_passed_over():
    said = {
        "choice": ["a", "b"],
        "priority": -3,
        "typical_p": 0.5,
        "bad_words": [[1], [2, 3]],
        "allowed_ids": [4, 5],
        "cache_salt": "tenant",
        "deadline_s": 2.5,
        "embed": "mean",
        "logits_processors": {"favour": {"token": 3}},
    }
    assert own_params({NAME: said, "theirs": 1}) == msgspec.convert(said, OwnParams)
    assert set(said) == set(OwnParams.__struct_fields__)
    assert own_params(None) == own_params({}) == own_params({NAME: {}}) == OwnParams()


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"typical_p": 0.0}, r"\$.typical_p"),
        ({"typical_p": 1.5}, r"\$.typical_p"),
        ({"typical_p": float("nan")}, "typical_p"),
        ({"deadline_s": 0}, r"\$.deadline_s"),
        ({"deadline_s": float("nan")}, "deadline_s"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"bad_words": [[]]}, r"\$.bad_words"),
        ({"bad_words": [[1] * 33]}, r"\$.bad_words"),
        ({"bad_words": [["text"]]}, r"\$.bad_words"),
        ({"bad_words": [[1]] * 1025}, r"\$.bad_words"),
        ({"allowed_ids": []}, r"\$.allowed_ids"),
        ({"allowed_ids": [-1]}, r"\$.allowed_ids"),
        ({"allowed_ids": [1 << 31]}, r"\$.allowed_ids"),
        ({"cache_salt": "x" * 1025}, r"\$.cache_salt"),
        ({"priority": 1 << 40}, r"\$.priority"),
        ({"logits_processors": ["favour"]}, r"\$.logits_processors"),
        ([], "object"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(said, named):
    with pytest.raises(msgspec.ValidationError, match=named):
        own_params({NAME: said})
