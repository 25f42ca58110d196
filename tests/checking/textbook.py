"""The textbook form as a module; subclasses in the tests change one step."""

import math

from attnbench.contract import Attention


class Textbook(Attention):
    """Right, except that a query which sees no key gets NaN."""

    fill = -math.inf

    def scores(self, query, key, mask):
        products = query @ key.mT * mask.scale_for(query.shape[-1])
        added = mask.added(products.dtype, hides=False)
        scores = products if added is None else products + added
        return scores if mask.hidden is None else scores.masked_fill(mask.hidden, self.fill)

    def attend(self, query, key, value, mask):
        return self.scores(query, key, mask).softmax(-1) @ value
