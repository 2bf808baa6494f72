"""Runs an engine in the test's own thread: the single-process run that every other way of serving is compared with."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from engine.cache.layout import KvLayout
from engine.config import CacheConfig, KvDtype, SchedulerConfig
from engine.engine import Engine, ExportListener
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model
from engine.spec.speculation import Speculation
from engine.types import EngineRequest, RequestId, SamplingParams


def make_engine(
    source: Path | str,
    *,
    num_blocks: int = 256,
    block_size: int = 16,
    dtype: KvDtype = KvDtype.FP32,
    prefix_cache: bool = True,
    listener: ExportListener | None = None,
    scheduler: SchedulerConfig | None = None,
    speculation: Speculation | None = None,
) -> Engine:
    """Return an engine over a model on disk."""
    model = load_model(str(source))
    config = model.config
    layout = KvLayout(model.fingerprint, config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)
    cache_config = CacheConfig(num_blocks, block_size, dtype, prefix_cache)
    cache = KvCache(layout, num_blocks, torch.device("cpu"))
    return Engine(model, cache, cache_config, scheduler or SchedulerConfig(), listener, speculation)


def make_request(request_id: int, prompt: Sequence[int], **params: object) -> EngineRequest:
    """Return a request; greedy with 16 tokens unless `params` say otherwise."""
    values: dict[str, object] = {"max_tokens": 16, "temperature": 0.0} | params
    sampling_params = SamplingParams(**values)  # type: ignore[arg-type]  # fields are checked by name at run time
    return EngineRequest(RequestId(request_id), tuple(prompt), sampling_params, len(prompt))


def run_to_end(
    engine: Engine,
    before_step: Callable[[int], None] = lambda step: None,
    max_steps: int = 5000,
    first_index: int = 0,
) -> dict[int, list[int]]:
    """Step until nothing is left to do; returns every request's tokens.

    Args:
        engine: With requests added.
        before_step: Called with the step's number, for arrivals and removals on the way.
        max_steps: A run that is longer has hung.
        first_index: Index of each request's first token; 1 behind a hand-off.
    """
    tokens: dict[int, list[int]] = {}
    for step in range(max_steps):
        before_step(step)
        if not engine.has_work:
            return tokens
        for output in engine.step():
            received = tokens.setdefault(output.request_id, [])
            assert output.error is None
            assert output.token_index == first_index + len(received)
            received += output.token_ids
        engine.scheduler.check_invariants()
    raise AssertionError("the engine did not come to an end")


def arriving(engine: Engine, requests: Iterable[EngineRequest], every: int = 3) -> Callable[[int], None]:
    """A `before_step` for `run_to_end` that adds one request every so many steps, the first before step 0."""
    waiting = iter(requests)

    def before_step(step: int) -> None:
        if step % every == 0 and (request := next(waiting, None)) is not None:
            engine.add(request)

    return before_step


def run_alone(engine: Engine, requests: Sequence[EngineRequest]) -> dict[int, list[int]]:
    """Run requests one after the other, each on an empty prefix cache; returns their tokens."""
    tokens: dict[int, list[int]] = {}
    for request in requests:
        engine.pool.flush()
        engine.add(request)
        tokens |= run_to_end(engine)
    return tokens
