"""Prompts of an exact number of tokens, cut from natural text, all different from their first token on.

Different beginnings keep the prefix cache out of measurements that are not about it.
"""

import random
from collections.abc import Callable, Sequence

from benchmarks.common.data import corpus
from kvrelay.client import AsyncClient


class PromptSource:
    """Cuts prompts from one long list of tokens.

    Args:
        token_ids: Natural text as the model's tokens; gone round when a prompt is longer.
        seed: Another seed gives other prompts.
    """

    def __init__(self, token_ids: Sequence[int], seed: int = 0) -> None:
        if not token_ids:
            raise ValueError("there is no text to cut prompts from")
        self._token_ids = tuple(token_ids)
        self._seed = seed

    def cut(self, num_tokens: int, key: str) -> tuple[int, ...]:
        """Return `num_tokens` tokens. Equal keys give prompts that begin alike, whatever their length."""
        total = len(self._token_ids)
        start = random.Random(f"{self._seed} {key}").randrange(total)
        return tuple(self._token_ids[(start + offset) % total] for offset in range(num_tokens))

    @classmethod
    async def load(cls, client: AsyncClient, seed: int = 0) -> "PromptSource":
        """Tokenize the texts in `benchmarks/data` with a gateway's tokenizer."""
        token_ids: list[int] = []
        for text in corpus():
            token_ids += await client.tokenize(text)
        return cls(token_ids, seed)

    @classmethod
    def from_texts(cls, encode: Callable[[str], Sequence[int]], seed: int = 0) -> "PromptSource":
        """Tokenize the same texts with a tokenizer of this process; the prompts are the same."""
        return cls([token_id for text in corpus() for token_id in encode(text)], seed)
