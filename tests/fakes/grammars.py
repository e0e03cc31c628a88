"""Grammars of one answer, for planes that draw from masks."""

import numpy as np

EOS = 0


class Line:
    """A grammar of one answer: some ids, then eos."""

    def __init__(self, ids):
        self.ids = (*ids, EOS)

    def matcher(self):
        return Follower(self.ids)


class Follower:
    """Where one request stands on a line."""

    stop_ids = (EOS,)

    def __init__(self, ids):
        self.ids = ids
        self.at = 0

    @property
    def terminated(self):
        return self.at == len(self.ids)

    def fill(self, masks, row):
        assert not self.terminated
        masks[row] = 0
        token = self.ids[self.at]
        masks[row, token // 32] = np.int32(1) << (token % 32)

    def accept(self, token):
        fits = token == self.ids[self.at]
        self.at += fits
        return fits

    def rollback(self, tokens):
        self.at -= tokens
