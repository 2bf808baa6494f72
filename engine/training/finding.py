"""Heads that find, built rather than trained: some attention looks where the context holds the coming token already.

Much of what a model says stands in its context: names out of a passage, a sentence said before, a loop. A lookup of the
newest two tokens tells most of it. The finding heads of a draft head (`engine/spec/head/format.py`) are that lookup in
one layer of attention, an induction head (Olsson et al., arXiv 2209.11895): a row's key holds codes of the two tokens
before its own, a query codes of the newest two, and a row's value tells its own token. Training finds such weights
slowly and for frequent tokens only; written down, they work for every token from the start.
"""

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.spec.head import format as names
from engine.spec.head.format import num_finding_kv_heads
from engine.training.head import DraftHead

_NEWEST_SHARE: Final = 0.625
"""Of a head's width for the code of the newest token; the one before it takes the rest."""
_NEWEST_SCORE: Final = 14.0
"""What a row gains where the newest token is the same. Attention goes by e^score, so this drowns a thousand others."""
_BEFORE_SCORES: Final = (6.0, 12.0, 2.0)
"""What it gains where the token before is the same too, by query head, again and again: some insist on both tokens,
some take what they find."""
_NOISE: Final = 1e-4
"""Directions so much weaker than the main one tell nothing."""


@torch.no_grad()
def build_finding(head: DraftHead, taps: Tensor) -> None:
    """Write the weights of a head's finding heads: what they compare, what their values hold and what becomes of it.

    Args:
        head: Initialised.
        taps: [num_rows, num_taps * hidden_size] of some text, which say how long features are.
    """
    num_kv_heads = num_finding_kv_heads(head.target.config)
    if num_kv_heads:
        codes = _Codes(head)
        _compare(head, codes, num_kv_heads)
        _tell(head, codes, num_kv_heads, functional.linear(taps, head.weight(names.FUSE)).norm(dim=1).median())


class _Codes:
    """Short codes of tokens: projections of their normed embeddings on the directions in which these differ most."""

    def __init__(self, head: DraftHead) -> None:
        weight = head.weight(names.EMBEDDING_NORM)
        eps = head.target.config.rms_norm_eps
        embedded = functional.rms_norm(head.target.embedding[head.vocab_ids], weight.shape, weight, eps)
        common = functional.normalize(embedded.mean(0), dim=0)
        self.embedded = embedded - (embedded @ common)[:, None] * common
        """[num_vocab_ids, hidden_size], without what they have in common."""
        self._left, self._strengths, self._directions = torch.linalg.svd(self.embedded, full_matrices=False)

    def projection(self, width: int) -> Tensor:
        """Return [width, hidden_size], along which all directions count the same and codes are about 1 long."""
        width = min(width, int((self._strengths > self._strengths[0] * _NOISE).sum()))
        projection: Tensor = self._directions[:width] / self._strengths[:width, None]
        return projection.div_(self._left[:, :width].norm(dim=1).mean())

    def told(self, width: int, rows: Tensor) -> Tensor:
        """Return [hidden_size, width], by least squares from codes to the tokens' rows, whose length is of no account.

        Codes are the left singular vectors but for a factor, and those are orthogonal.
        """
        told: Tensor = (rows - rows.mean(0)).T @ self._left[:, :width]
        return told


def _compare(head: DraftHead, codes: _Codes, num_kv_heads: int) -> None:
    """A query of the newest two tokens against keys of the two tokens before each row's own."""
    config = head.target.config
    hidden, dim = config.hidden_size, config.head_dim
    num_newest = int(dim * _NEWEST_SHARE)
    newest, before = codes.projection(num_newest), codes.projection(dim - num_newest)
    query, key = head.weight(names.FIND_QUERY).zero_(), head.weight(names.FIND_KEY).zero_()
    # As large in keys as in queries, so that neither loses much where it is quantized.
    root = (_NEWEST_SCORE * dim**0.5) ** 0.5
    for start in range(0, num_kv_heads * dim, dim):
        key[start : start + len(newest), :hidden] = newest * root
        key[start + num_newest : start + num_newest + len(before), hidden:] = before * root
    for number, start in enumerate(range(0, len(query), dim)):
        query[start : start + len(newest), :hidden] = newest * root
        score = _BEFORE_SCORES[number % len(_BEFORE_SCORES)]
        query[start + num_newest : start + num_newest + len(before), hidden:] = before * (root * score / _NEWEST_SCORE)


def _tell(head: DraftHead, codes: _Codes, num_kv_heads: int, length: Tensor) -> None:
    """Values carry their row's token as a code, outputs turn it into the token's output row, `length` long."""
    config = head.target.config
    hidden, dim = config.hidden_size, config.head_dim
    main = codes.projection(dim)
    told = codes.told(len(main), head.output_rows)
    told = told * length / (codes.embedded @ main.T @ told.T).norm(dim=1).mean()
    value, output = head.weight(names.V_PROJ), head.weight(names.O_PROJ)
    for start in range(0, num_kv_heads * dim, dim):
        value[start : start + dim] = 0.0
        value[start : start + len(main), :hidden] = main
    num_heads = num_kv_heads * (config.num_heads // config.num_kv_heads)
    for start in range(0, num_heads * dim, dim):
        output[:, start : start + dim] = 0.0
        output[:, start : start + len(main)] = told / num_heads
