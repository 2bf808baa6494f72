"""Checks with the device named: on the CPU under the interpreter by the tests here, on a GPU by `make test-gpu`.

    python -m tests.oracle.triton.device_checks engine|reports|transfer cuda FOLDER

FOLDER holds a tiny model. A check that fails raises.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.engine import ChunkProgress, Engine
from engine.model.cuda.cache import DeviceKvCache
from engine.model.cuda.model import CudaModel
from engine.sequence import Sequence as EngineSequence
from engine.spec.speculation import Speculation
from engine.types import EngineRequest, RequestId, SequenceOutput
from kv_transfer.transports.ucx.transport import UcxTransport
from kvrelay.values import PositionLogprobs
from tests.engine_driver import make_request
from tests.fakes_handoff import blocks, run_tiers
from tests.fakes_transport import ArrayCache
from worker.compute.bootstrap import build_engine
from worker.settings import WorkerSettings

PROMPT = [5, 9, 200, 17, 3, 88, 41, 5, 9, 200, 17, 3, 88, 41, 5, 9, 200, 17]
OTHER = [7, 150, 33, 21, 64, 2, 9, 100, 12, 55, 250, 6, 91, 30, 31, 44, 45, 46, 47, 48, 49, 50]
NUM_BLOCKS = 24
LAYOUT = KvLayout("model", 2, 4, 32, 16, KvDtype.FP16)


def settings(folder: Path, compute: str, device: torch.device, **values: object) -> WorkerSettings:
    """Settings of a small worker, fp32 unless told otherwise."""
    fields: dict[str, object] = {
        "model": str(folder),
        "device": str(device),
        "compute": compute,
        "dtype": "fp32",
        "num_blocks": NUM_BLOCKS,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 20,
        "max_draft_tokens": 2,
    }
    return WorkerSettings.model_validate(fields | values)


class Told(Speculation):
    """Proposes what it was told will come; later on with a mistake."""

    def __init__(self, truth: Mapping[int, Sequence[int]]) -> None:
        self._truth = truth

    def propose(self, sequences: Sequence[EngineSequence]) -> dict[RequestId, tuple[int, ...]]:
        drafts = {}
        for sequence in sequences:
            known = self._truth[sequence.request_id][sequence.num_output_tokens :][:2]
            if sequence.num_output_tokens > 3:
                known = [*known[:1], *(token_id ^ 1 for token_id in known[1:])]
            drafts[sequence.request_id] = tuple(known)
        return drafts

    def observe(self, plan: object, outputs: object, seconds: float) -> None:
        pass

    def forget(self, request_id: RequestId) -> None:
        pass


def check_engine(folder: Path, device: torch.device) -> None:
    """A worker's engine on Triton gives the tokens of the one on plain PyTorch.

    Prompts in chunks, decode in captured steps, drafts, a prefix from the cache, sampling and logprobs on the device.
    """
    engine = build_engine(settings(folder, "triton", device))
    assert isinstance(engine.model, CudaModel)
    wanted = _outputs_of(build_engine(settings(folder, "torch", device, speculation="none")))
    truth = {key: _tokens(value) for key, value in wanted.items()}
    engine._speculation = Told(truth)
    found = _outputs_of(engine)
    assert {key: _tokens(value) for key, value in found.items()} == truth
    accepted = {len(output.token_ids) for outputs in found.values() for output in outputs}
    assert accepted >= {2, 3}, "drafts were accepted in part and whole"
    assert engine.load().num_cache_hit_tokens == 16
    ours, theirs = _logprobs(found[RequestId(2)]), _logprobs(wanted[RequestId(2)])
    assert len(ours) == len(theirs) == 4
    for mine, other in zip(ours, theirs, strict=True):
        assert [top.token_id for top in mine.top] == [top.token_id for top in other.top]
        assert mine.sampled.rank == other.sampled.rank
        assert abs(mine.sampled.logprob - other.sampled.logprob) < 1e-3
    assert engine.pool.num_free_blocks == NUM_BLOCKS


def _requests() -> list[EngineRequest]:
    return [
        make_request(1, PROMPT, max_tokens=8),
        make_request(2, OTHER, max_tokens=4, temperature=0.8, top_p=0.9, seed=11, logprobs=2),
        # The same prompt again: its first block is found in the prefix cache once the one above has filled it.
        make_request(3, [*OTHER, 8], max_tokens=3, temperature=1.2, top_k=20, seed=5, frequency_penalty=0.5),
    ]


def _outputs_of(engine: Engine) -> dict[int, list[SequenceOutput]]:
    found: dict[int, list[SequenceOutput]] = {}
    first, second, late = _requests()
    engine.add(first)
    engine.add(second)
    for step in range(200):
        if step == 4:
            engine.add(late)
        if not engine.has_work:
            return found
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    raise AssertionError("the engine did not come to an end")


def _tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def _logprobs(outputs: list[SequenceOutput]) -> list[PositionLogprobs]:
    return [position for output in outputs for position in output.logprobs]


class Listener:
    """Reads a block of each layer at once, as an exporter would."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []
        self.blocks: list[bytes] = []
        self.cache: DeviceKvCache | None = None

    def on_layer(self, layer: int, progress: tuple[ChunkProgress, ...]) -> None:
        assert self.cache is not None
        self.seen.append((layer, progress[0].num_tokens))
        buffer = bytearray(self.cache.layout.block_bytes)
        self.cache.read_blocks(layer, progress[0].block_ids[:1], memoryview(buffer))
        self.blocks.append(bytes(buffer))


def check_reports(folder: Path, device: torch.device) -> None:
    """Layers of a hand-off are reported when they are written: what is read then is what is there in the end."""
    listener = Listener()
    engine = build_engine(settings(folder, "triton", device, speculation="none"), listener)
    assert isinstance(engine.kv_cache, DeviceKvCache)
    listener.cache = engine.kv_cache
    engine.add_handoff(make_request(1, OTHER[:22]))
    while len(listener.seen) < 4 and engine.has_work:
        engine.step()
    assert listener.seen == [(0, 20), (1, 20), (0, 22), (1, 22)]
    assert listener.blocks[:2] == listener.blocks[2:]
    assert all(any(block) for block in listener.blocks)
    engine.kv_cache.close()


def random_cache(layout: KvLayout, num_blocks: int, device: torch.device, seed: int) -> DeviceKvCache:
    """A cache of random bytes that every element type can be."""
    cache = DeviceKvCache(layout, num_blocks, device)
    generator = torch.Generator().manual_seed(seed)
    cache.bytes.copy_(torch.randint(0, 120, cache.bytes.shape, generator=generator).byte())
    return cache


async def check_transfer(device: torch.device, dtype: KvDtype) -> None:
    """Blocks go through UCX from one device cache to another, no byte on the host between."""
    layout = replace(LAYOUT, dtype=dtype)
    source, sink = random_cache(layout, 12, device, seed=1), random_cache(layout, 10, device, seed=2)
    untouched = sink.bytes.clone()
    mine, theirs = blocks(7, 2, 9, 0), blocks(3, 8, 1, 6)
    transport = UcxTransport(device=source.device_memory)
    async with run_tiers(
        transport=transport, source_cache=cast(ArrayCache, source), sink=cast(ArrayCache, sink)
    ) as tiers:
        handle = tiers.importer.reserve(theirs, 0, 60, "session", 30.0)
        async with tiers.exporter.begin(handle, is_layerwise=True) as export:
            for num_tokens in (32, 60):
                for layer in range(layout.num_layers):
                    export.layer_ready(layer, num_tokens, mine)
            await export.finish(b"")
    assert source.device_memory.num_bytes > 0, "payloads lay in device memory"
    assert torch.equal(sink.bytes[:, theirs], source.bytes[:, mine])
    others = [block for block in range(10) if block not in theirs]
    assert torch.equal(sink.bytes[:, others], untouched[:, others])


def main(name: str, device: torch.device, folder: Path) -> None:
    """Run one check."""
    match name:
        case "engine":
            check_engine(folder, device)
        case "reports":
            check_reports(folder, device)
        case "transfer":
            for dtype in (KvDtype.FP16, KvDtype.INT8, KvDtype.FP8):
                asyncio.run(check_transfer(device, dtype))
        case _:
            raise ValueError(f"no check is called {name}")


if __name__ == "__main__":
    main(sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3]))
