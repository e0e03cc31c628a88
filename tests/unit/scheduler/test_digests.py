"""The digests of a prompt's pages, one by one and in parts."""

import pytest

from drumline.core.hashing import DIGEST_BYTES
from drumline.scheduler.digests import Digests

THREE = [bytes([n]) * DIGEST_BYTES for n in (1, 2, 3)]


def test_digests_are_indexed_sliced_and_iterated_as_a_list_of_them_is():
    digests = Digests(b"".join(THREE))
    assert len(digests) == 3
    for at in range(-3, 3):
        assert digests[at] == THREE[at]
    assert digests[1:] == THREE[1:]
    assert list(digests) == THREE
    assert THREE[2] in digests


@pytest.mark.parametrize("at", [-4, 3])
def test_a_digest_that_is_not_there_is_an_index_error(at):
    with pytest.raises(IndexError, match=f"{at} of 3 digests"):
        Digests(b"".join(THREE))[at]
