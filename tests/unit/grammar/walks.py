"""Random walks over what a grammar's masks allow."""

import numpy as np

LONGEST = 400
HURRY = 60
"""Tokens after which a walk takes every way towards its end that there is."""
# What closes something, or adds nothing: taken often, a walk ends.
CLOSING = (b'"', b"}", b"]", b'"}', b'"]', b"]}", b"}}", b'":', b":", b",", b'",')


class Walker:
    """Draws texts on one vocabulary."""

    def __init__(self, vocabulary, eos):
        self.vocabulary = vocabulary
        self.eos = eos
        ids = {piece: id_ for id_, piece in enumerate(vocabulary.pieces) if piece}
        # Ways to an end first, then single letters, which lead anywhere in little steps.
        self.closing = np.array([ids[piece] for piece in CLOSING if piece in ids])
        self.ending = self.closing[: CLOSING.index(b'":')]
        self.single = np.array([ids[bytes([b])] for b in range(33, 127) if bytes([b]) in ids])
        self.masks = np.zeros((1, vocabulary.mask_words), np.int32)

    def allowed(self, matcher):
        """Return what may come next, a truth value for each id."""
        matcher.fill(self.masks, 0)
        bits = np.unpackbits(self.masks.view(np.uint8), bitorder="little")
        return bits[: self.vocabulary.size].view(np.bool_)

    def walk(self, grammar, draw, longest=LONGEST):
        """Return a text and whether the grammar ended it; every id that is drawn must be taken."""
        matcher = grammar.matcher()
        text = b""
        for step in range(longest):
            allowed = self.allowed(matcher)
            token = self._drawn(allowed, draw, step)
            assert token is not None, f"nothing may follow {text!r}"
            assert matcher.accept(token), f"{token} was allowed after {text!r} and is not taken"
            if matcher.terminated:
                return text, True
            text += self.vocabulary.pieces[token]
        return text, False

    def _drawn(self, allowed, draw, step):
        hurry = step > HURRY
        if allowed[self.eos] and (hurry or draw.random() < 0.3):
            return self.eos
        for ids, often in ((self.ending, 0.4), (self.closing, 0.3), (self.single, 0.5)):
            if hurry or draw.random() < often:
                usable = ids[allowed[ids]]
                if len(usable):
                    return int(usable[draw.integers(len(usable))])
        everything = np.flatnonzero(allowed)
        return int(everything[draw.integers(len(everything))]) if len(everything) else None
