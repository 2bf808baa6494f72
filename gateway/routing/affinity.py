"""Remembers which worker has seen which prompt prefix, so that equal prefixes meet the same prefix cache.

A hint only: the router may go elsewhere, and what a worker really holds is for it to say.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence

import xxhash

from engine.types import WorkerId

_PREFIX_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Prefix lengths that are remembered: doubling keeps a long prompt at a few entries."""


def prefix_keys(token_ids: Sequence[int], cache_salt: str, common: Sequence[int] = ()) -> list[int]:
    """Return one key per remembered prefix length that the prompt fills, shortest first.

    Args:
        token_ids: The prompt.
        cache_salt: Prefixes under different salts have nothing in common.
        common: How prompts begin that have nothing but the chat template in common: where a prompt begins so too, that
            part tells nothing about who holds it, and the lengths count from its end on.
    """
    num_common = 0
    for token_id, common_id in zip(token_ids, common, strict=False):
        if token_id != common_id:
            break
        num_common += 1
    token_ids = token_ids[num_common:]
    digest = xxhash.xxh3_64(cache_salt.encode())
    keys: list[int] = []
    start = 0
    for end in _PREFIX_TOKENS:
        if end > len(token_ids):
            break
        digest.update(struct.pack(f"<{end - start}I", *token_ids[start:end]))
        keys.append(digest.intdigest())
        start = end
    return keys


class PrefixAffinity:
    """Prefix key -> worker, the least recently used forgotten beyond `capacity`."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._worker_by_key: OrderedDict[int, WorkerId] = OrderedDict()

    def __len__(self) -> int:
        return len(self._worker_by_key)

    def preferred(self, keys: Sequence[int]) -> WorkerId | None:
        """Return the worker that saw the longest of these prefixes; None: nobody did."""
        for key in reversed(keys):
            worker_id = self._worker_by_key.get(key)
            if worker_id is not None:
                return worker_id
        return None

    def remember(self, keys: Sequence[int], worker_id: WorkerId) -> None:
        """Note that the worker is about to hold these prefixes."""
        for key in keys:
            self._worker_by_key[key] = worker_id
            self._worker_by_key.move_to_end(key)
        while len(self._worker_by_key) > self._capacity:
            self._worker_by_key.popitem(last=False)

    def forget_worker(self, worker_id: WorkerId) -> None:
        """Drop all that is known of a worker that went away."""
        for key in [key for key, holder in self._worker_by_key.items() if holder == worker_id]:
            del self._worker_by_key[key]
