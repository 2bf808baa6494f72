"""Milliseconds of one model step on the CPU, by number of rows, context and threads, and what they are spent on.

    python -m benchmarks.cpu_step [--rows 1,8,512] [--context 100,1000] [--threads 1,2] [--kv-dtype fp32] [--verify]

Up to 32 rows are sequences that each decode a token, or, with --verify, one sequence's draft tokens; more are one
prefill chunk. The best of `--repeats` steps counts, since other programs may share the cores. `python` is the step's
time outside the native call. Needs a checkpoint that runs natively.
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cache.layout import KvLayout
from engine.config import KvDtype
from engine.kernels.cpu.build import KernelsUnavailable, build_library, choose_isa
from engine.kernels.cpu.library import StepPart
from engine.model.batch import StepBatch
from engine.model.cpu.model import NativeModel
from engine.model.kv_cache import KvCache
from engine.model.loader import load_model

_BLOCK_SIZE = 16
_MAX_DECODE_ROWS = 32
_PRODUCTS = (StepPart.QKV, StepPart.OUTPUT, StepPart.GATE_UP, StepPart.DOWN, StepPart.LM_HEAD)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The best step, in milliseconds."""

    total: float
    parts: dict[StepPart, float]

    @property
    def products(self) -> float:
        """Matrix products, with what is fused into them."""
        return sum(self.parts[part] for part in _PRODUCTS)

    @property
    def attention(self) -> float:
        """Attention alone; writing KV is fused into the products."""
        return self.parts[StepPart.ATTENTION]

    @property
    def other(self) -> float:
        """Embedding, and norms that are not fused."""
        return self.parts[StepPart.EMBED] + self.parts[StepPart.NORM]

    @property
    def python(self) -> float:
        """Outside the phases of the native call: Python, checks, and starting the threads."""
        return self.total - self.products - self.attention - self.other


def make_batch(num_seqs: int, num_rows: int, context: int, block_tables: torch.Tensor) -> StepBatch:
    """A step of `num_rows` tokens of each sequence after `context` tokens; decodes want logits, chunks one row."""
    positions = torch.arange(context, context + num_rows).repeat(num_seqs)
    sequence = torch.arange(num_seqs).repeat_interleave(num_rows)
    blocks = block_tables[sequence, positions // _BLOCK_SIZE].long()
    total = num_seqs * num_rows
    is_chunk = num_rows > _MAX_DECODE_ROWS
    return StepBatch(
        token_ids=torch.arange(total) * 37 % 1000 + 100,
        positions=positions,
        slot_mapping=blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE,
        query_start=torch.arange(0, total + 1, num_rows, dtype=torch.int32),
        context_lens=torch.full((num_seqs,), context + num_rows, dtype=torch.int32),
        block_tables=block_tables,
        logit_rows=torch.tensor([total - 1]) if is_chunk else torch.arange(total),
    )


def measure(
    model: NativeModel, rows: int, context: int, kv_dtype: KvDtype, *, is_verify: bool, repeats: int
) -> StepTime:
    """Time a step of `rows` rows at a context."""
    num_seqs, num_rows = (1, rows) if is_verify or rows > _MAX_DECODE_ROWS else (rows, 1)
    layout = KvLayout.of_model(model.fingerprint, model.config, _BLOCK_SIZE, kv_dtype)
    blocks_each = layout.num_blocks(context + num_rows)
    cache = KvCache(layout, num_seqs * blocks_each, model.device)
    cache.bytes.fill_(0x3C)  # touches every page; an ordinary number in every dtype
    order = torch.randperm(num_seqs * blocks_each, generator=torch.Generator().manual_seed(0))
    batch = make_batch(num_seqs, num_rows, context, order.to(torch.int32).view(num_seqs, blocks_each))
    best: StepTime | None = None
    for _ in range(repeats):
        spent = model.measure()
        start = time.perf_counter()
        model.forward(batch, cache)
        total = (time.perf_counter() - start) * 1e3
        if best is None or total < best.total:
            best = StepTime(total, {part: float(spent[part]) / 1e6 for part in StepPart})
    if best is None:
        raise ValueError("repeats must be at least 1")
    return best


def main() -> None:
    """Print one line per setting."""
    parser = argparse.ArgumentParser(description="Milliseconds of one model step on the CPU.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", default="1,2,4,8,16,64,512", help="comma-separated")
    parser.add_argument("--context", default="100,1000", help="tokens before the step, comma-separated")
    parser.add_argument("--threads", default="1,2", help="comma-separated")
    parser.add_argument("--kv-dtype", default="fp32", choices=[str(dtype) for dtype in KvDtype])
    parser.add_argument("--verify", action="store_true", help="rows of one sequence instead of one each of several")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    try:
        isa = choose_isa()
        start = time.perf_counter()
        library = build_library(isa)
    except KernelsUnavailable as error:
        parser.error(str(error))
    size_kib = library.stat().st_size // 1024
    print(f"kernels: {isa}, {size_kib} KiB, ready after {time.perf_counter() - start:.1f} s")
    for num_threads in map(int, arguments.threads.split(",")):
        start, before = time.perf_counter(), _resident_mib()
        model = load_model(arguments.model, compute="native", num_threads=num_threads)
        if not isinstance(model, NativeModel):
            parser.error(f"{arguments.model} does not run natively")
        loaded = time.perf_counter() - start
        print(f"\n{arguments.model}, {num_threads} thread(s), {arguments.kv_dtype} KV", end="; ")
        print(f"loaded in {loaded:.2f} s, {_resident_mib() - before} MiB more resident")
        print(" rows  context        ms    tok/s     gemm  attention   other  python")
        for context in map(int, arguments.context.split(",")):
            for rows in map(int, arguments.rows.split(",")):
                repeats = max(2, min(arguments.repeats, arguments.repeats * 32 // rows))
                found = measure(
                    model, rows, context, KvDtype(arguments.kv_dtype), is_verify=arguments.verify, repeats=repeats
                )
                print(
                    f"{rows:5d} {context:8d} {found.total:9.2f} {rows / found.total * 1e3:8.0f} {found.products:8.2f} "
                    f"{found.attention:10.2f} {found.other:7.2f} {found.python:7.2f}",
                    flush=True,
                )
        model.close()


def _resident_mib() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 // 2**20


if __name__ == "__main__":
    main()
