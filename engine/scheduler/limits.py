"""What can never be served here, refused before it is queued. Pure checks."""

from engine.cache.block_pool import BlockPool
from engine.sequence import Sequence
from kvrelay.errors import ContextTooLong


def check_fits(sequence: Sequence, pool: BlockPool, max_position: int) -> None:
    """Check that a sequence can reach its end if it is alone.

    Args:
        sequence: New here.
        pool: The worker's blocks.
        max_position: Longest context of the model in tokens.

    Raises:
        ContextTooLong: The context or the pool is too small.
    """
    longest = sequence.num_prompt_tokens + sequence.sampling_params.max_tokens
    if longest > max_position:
        raise ContextTooLong(
            "sampling_params.max_tokens",
            f"prompt and output together take {longest} tokens; the model's context holds {max_position}",
        )
    needed = sequence.num_tokens if sequence.is_handoff else longest
    capacity = pool.num_blocks * pool.block_size
    if needed > capacity:
        raise ContextTooLong(
            "sampling_params.max_tokens",
            f"the request takes up to {needed} tokens here; this worker's KV cache holds {capacity}",
        )
