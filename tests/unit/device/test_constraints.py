"""Rows that are held to grammars draw what their matchers allow, and no other row is touched."""

import gc

import numpy as np
import torch

from drumline.contract.grammar import Attachment, GrammarFaultError
from drumline.contract.request import Admission, Sampling
from drumline.device.sampling.constraints import keep
from drumline.device.sampling.sampler import Sampler

from .conftest import ints

VOCAB = 40


class Counting:
    """Allows one id after the other, from the first, up to the last."""

    stop_ids = (39,)

    def __init__(self, first, fails=False):
        self.at = first
        self.fails = fails
        self.taken = []

    def matcher(self):
        return self

    @property
    def terminated(self):
        return self.at == VOCAB

    def fill(self, masks, row):
        assert not self.terminated
        if self.fails:
            raise GrammarFaultError("too complex")
        masks[row] = 0
        masks[row].view(np.uint32)[self.at // 32] = 1 << (self.at % 32)

    def accept(self, token):
        self.taken.append(token)
        fits = token == self.at
        self.at += fits
        return fits

    def rollback(self, tokens):
        self.at -= tokens


class Choosing(Counting):
    """Allows the first ids, always the same."""

    def __init__(self, count=20):
        super().__init__(0)
        self.count = count

    def fill(self, masks, row):
        masks[row] = 0
        masks[row].view(np.uint32)[0] = (1 << self.count) - 1

    def accept(self, token):
        return token < self.count


def sampler_of(grammars, **sampling):
    """A sampler whose row n+1 is held to the n-th grammar, or to none."""
    sampler = Sampler(len(grammars) + 1, VOCAB)
    for row, grammar in enumerate(grammars, 1):
        rid = f"r{row}"
        sampler.admit(
            [Admission(rid=rid, prompt_tokens=1, sampling=Sampling(seed=row, **sampling))]
        )
        if grammar is not None:
            sampler.attach([Attachment(rid, grammar)])
        sampler.bind(row, rid)
    return sampler


def sample(sampler, rows, position=5):
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(position))
    return sampler.sample(logits, ints(*rows), ints(*[position] * len(rows)))


def test_held_rows_follow_their_grammars_and_others_draw_as_ever():
    held, other = Counting(3), Counting(30)
    sampler = sampler_of([held, None, other])
    free = sampler_of([None, None, None])
    drawn = []
    for position in range(5, 9):
        sampled = sample(sampler, [1, 2, 3], position)
        drawn.append(sampled.tokens.tolist())
        assert drawn[-1][1] == sample(free, [1, 2, 3], position).tokens[1]
        assert not sampled.bad.any()
        assert sampled.faults == ()
    assert [row[0] for row in drawn] == [3, 4, 5, 6]
    assert [row[2] for row in drawn] == [30, 31, 32, 33]


def test_an_ended_grammar_is_not_asked_again():
    held = Counting(39)
    sampler = sampler_of([held], top_k=1)
    assert sample(sampler, [1]).tokens.tolist() == [39]
    assert held.terminated
    sampled = sample(sampler, [1])
    assert sampled.faults == ()
    assert held.taken == [39]


def test_a_grammar_that_cannot_go_on_is_told_by_row():
    sampler = sampler_of([Counting(3), Counting(4, fails=True)])
    sampled = sample(sampler, [1, 2])
    assert sampled.faults == (1,)
    assert sampled.tokens.tolist()[0] == 3


def test_a_row_that_is_not_finite_takes_no_token():
    held = Counting(3)
    sampler = sampler_of([held])
    logits = torch.full((1, VOCAB), torch.nan)
    sampled = sampler.sample(logits, ints(1), ints(5))
    assert sampled.bad.tolist() == [True]
    assert held.taken == []


def test_a_request_keeps_its_place_in_its_grammar_when_it_changes_rows():
    held = Counting(3)
    sampler = sampler_of([held, None])
    sample(sampler, [1])
    sampler.bind(2, "r1")
    assert sample(sampler, [2]).tokens.tolist() == [4]


def test_a_row_keeps_what_its_mask_allows_however_much_that_is():
    vocab = 9999  # no multiple of what a word holds
    draw = np.random.default_rng(3)
    counts = [0, 1, 2, 300, 2048, 2049, 5000, 7950, 7951, 9000, 9998, 9999]
    allowed = np.zeros((len(counts), 32 * 313), np.bool_)
    for row, count in enumerate(counts):
        allowed[row, draw.choice(vocab, count, replace=False)] = True
    allowed[::2, vocab:] = True  # bits behind the vocabulary mean nothing
    words = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    logits = torch.randn(len(counts) + 2, vocab)
    rows = draw.permutation(len(counts) + 2)[: len(counts)]
    expected = logits.clone()
    for row, kept in zip(rows, allowed, strict=True):
        expected[row, torch.from_numpy(~kept[:vocab])] = -torch.inf
    before = logits.clone()
    handful = keep(logits, rows, words)
    assert not handful.logits[0].isfinite().any()
    assert handful.rows.tolist() == rows[:3].tolist()
    # A handful is kept aside; what it was taken from stays as it was.
    assert torch.equal(logits[handful.rows], before[handful.rows])
    logits[handful.rows] = -torch.inf
    for row, ids, values in zip(handful.rows, handful.ids, handful.logits, strict=True):
        found = values > -torch.inf
        logits[row, ids[found]] = values[found]
    assert torch.equal(logits, expected)


def test_a_row_draws_the_same_whether_it_is_a_handful_alone_or_beside_others():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1))

    def drawn(rows):
        sampler = sampler_of([Choosing(), Choosing(), None, Choosing(9)])
        sampled = sampler.sample(logits[rows].clone(), ints(*rows), ints(*[7] * len(rows)))
        return sampled.tokens.tolist()[rows.index(2)]

    assert drawn([2]) == drawn([1, 2, 3]) == drawn([4, 2])


def test_a_row_to_which_its_grammar_leaves_nothing_is_stuck_and_no_other_is_touched():
    sampler = sampler_of([Choosing(0), Counting(4)])
    sampled = sample(sampler, [1, 2])
    assert sampled.stuck.tolist() == [True, False]
    assert sampled.faults == ()
    assert not sampled.bad.any()
    assert sampled.tokens.tolist()[1] == 4


def test_no_matcher_outlives_the_request_that_it_was_made_for():
    class Makes(Counting):
        def matcher(self):
            return Counting(self.at)

    def alive():
        gc.collect()
        return sum(type(each) is Counting for each in gc.get_objects())

    before = alive()
    sampler = sampler_of([Makes(3), Makes(4)])
    sample(sampler, [1, 2])
    assert alive() == before + 2
    sampler.release(["r1", "r2", "r3"])
    assert alive() == before
