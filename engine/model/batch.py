"""The input tensors of one model call. Built by the runner from a step plan; holds no policy."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step, all sequences side by side.

    Rows of one sequence are consecutive and in position order:

        rows        0 1 2 3 4 | 5 | 6 7
        sequence    A A A A A | B | C C      query_start = [0, 5, 6, 8]

    `query_start`, `context_lens` and `block_tables` should be CPU tensors: the kernels plan from them on the host.
    """

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64, position of each token in its sequence, from 0."""
    slot_mapping: Tensor
    """[num_tokens] int64, `block_id * block_size + offset`: where the token's K and V go; no slot occurs twice."""
    query_start: Tensor
    """[num_seqs + 1] int32, half-open row ranges; every sequence has at least one row."""
    context_lens: Tensor
    """[num_seqs] int32, tokens in the KV cache after this step, this step's included."""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32, padded with 0."""
    logit_rows: Tensor
    """[num_logit_rows] int64, the rows whose logits are wanted, in the order in which they are returned."""
