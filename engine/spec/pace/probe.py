"""A short look at start-up at how a model's steps grow with rows and context, for the pacer's first decisions."""

import time
from collections.abc import Callable

from engine.model.batch import SequenceRows, build_batch
from engine.model.interface import LanguageModel
from engine.model.kv_cache import KvCache
from engine.spec.pace.cost import ASSUMED_SHAPE, FLAT_SHAPE, CostShape, StepLoad, fit_shape
from engine.types import BlockId

_ROWS = (1, 2, 3, 4, 6, 8, 9, 12, 16)
_CONTEXTS = (32, 512)
_MAX_ROUNDS = 3
BUDGET_S = 0.4


def probe_shape(
    model: LanguageModel,
    kv_cache: KvCache,
    *,
    budget_s: float = BUDGET_S,
    clock: Callable[[], float] = time.perf_counter,
) -> CostShape:
    """Return how the model's steps grow, from the best of a few short ones.

    Writes into the cache's first blocks: to be called before they belong to anyone. What does not fit in the budget,
    in seconds, is assumed; so is everything on a GPU, where a step of another size is prepared anew at its first use.
    """
    if model.device.type != "cpu":
        return FLAT_SHAPE
    layout = kv_cache.layout
    most = min(kv_cache.num_blocks * layout.block_size, model.config.max_position)
    contexts = sorted({min(context, most - max(_ROWS)) for context in _CONTEXTS})
    if contexts[0] < 1:
        return ASSUMED_SHAPE
    blocks = [BlockId(index) for index in range(layout.num_blocks(contexts[-1] + max(_ROWS)))]
    best: dict[StepLoad, float] = {}
    started = clock()
    # Whatever a first step sets up is not measured.
    model.forward(build_batch([SequenceRows([0], contexts[-1], blocks, 1)], layout.block_size), kv_cache)
    for number in range(_MAX_ROUNDS):
        for context in contexts:
            for rows in _ROWS:
                batch = build_batch([SequenceRows([0] * rows, context, blocks, rows)], layout.block_size)
                before = clock()
                model.forward(batch, kv_cache)
                now = clock()
                load = StepLoad(rows, context, (rows - 1) * context)
                best[load] = min(best.get(load, now - before), now - before)
                if now - started > budget_s:
                    return fit_shape(best.items()) if number else ASSUMED_SHAPE
    return fit_shape(best.items())
