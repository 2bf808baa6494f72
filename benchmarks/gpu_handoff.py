"""Prefill and decode as two processes on one device: KV leaves layer by layer while the prompt is computed.

    prefill process   computes; as soon as a layer is written, its blocks are in shared memory, or readable through the
                      handle of its cache (cuda_ipc); a flag per layer says so
    decode process    imports each layer when its flag is up, then decodes; its tokens must be those of one process

The protocol of a real hand-off (leases, epochs, digests) is not part of this; `kv_transfer` has it and its own tests.
This measures the data path of the device: export beside the computation, and import.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks.gpu_bench import Bench, Ceilings
from benchmarks.gpu_model import batch_of, config_of, cuda_model, new_cache
from engine.kernels.triton.kv_copy import copy_kv
from engine.kernels.triton.layer_cache import LayerCache
from engine.model.cuda.cache import DeviceKvCache
from engine.model.cuda.linear import WeightFormat
from engine.model.cuda.model import CudaModel

_LAYERS = 8
_FIRST_BLOCK = {"prefill": 3, "decode": 11}
"""The two caches use different blocks, as they would."""
_NUM_TOKENS = 12
_TIMEOUT_S = 60.0
_FLAG_BYTES = 4096


class SharedLayers:
    """A file in memory: one flag per layer, then each layer's blocks. The flag is the time at which they were ready."""

    def __init__(self, path: Path, num_layers: int, layer_bytes: int) -> None:
        """Map the file, which has the right size already."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _FLAG_BYTES + num_layers * layer_bytes)
        self.flags: npt.NDArray[np.int64] = np.frombuffer(self._map, np.int64, num_layers)
        self._layer_bytes = layer_bytes

    def layer(self, index: int) -> memoryview:
        """The bytes of a layer's blocks."""
        first = _FLAG_BYTES + index * self._layer_bytes
        return memoryview(self._map)[first : first + self._layer_bytes]

    def wait(self, index: int) -> None:
        """Wait until a layer is ready.

        Raises:
            TimeoutError: It does not come.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not self.flags[index]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"layer {index} did not come")
            time.sleep(20e-6)


def run_prefill(bench: Bench, path: Path, is_ipc: bool) -> None:
    """The prefill process: says `ready` with its cache's handle, waits for a line, computes, says when it was done."""
    model, cache, length = _build(bench)
    ids = _blocks("prefill", length)
    shared = SharedLayers(path, model.config.num_layers, len(ids) * cache.layout.block_bytes)
    tokens = _prompt(bench, length)
    model.forward(batch_of([(0, length, _FIRST_BLOCK["prefill"])], model.config.vocab_size, tokens), cache)
    for layer in range(model.config.num_layers):  # once before it counts: staging memory, compiled copies
        cache.read_blocks(layer, ids, shared.layer(layer))
    handle = _handle(cache.bytes) if is_ipc else None
    _say({"ready": True, "handle": handle})
    sys.stdin.readline()
    export = _Exporter(cache, shared, ids, is_ipc=is_ipc)
    started = time.time_ns()
    batch = batch_of([(0, length, _FIRST_BLOCK["prefill"])], model.config.vocab_size, tokens)
    # The interpreter runs one kernel at a time, so in a rehearsal nothing is exported beside the computation.
    logits = model.forward(batch, cache, export.export if bench.is_rehearsal else export.offer)
    first_token = int(logits[-1].argmax())
    computed = time.time_ns()
    export.finish()
    _say({"first_token": first_token, "started_ns": started, "computed_ns": computed})
    sys.stdin.readline()  # the handle must stay valid until the other side has read


class _Exporter:
    """Brings layers out as they are written, on a thread beside the one that computes."""

    def __init__(self, cache: DeviceKvCache, shared: SharedLayers, ids: Sequence[int], *, is_ipc: bool) -> None:
        self._cache = cache
        self._shared = shared
        self._ids = ids
        self._is_ipc = is_ipc
        self._queue: SimpleQueue[int | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def offer(self, layer: int) -> None:
        """Export a layer soon."""
        self._queue.put(layer)

    def export(self, layer: int) -> None:
        """Export a layer now; it is written by the time it is reported."""
        if not self._is_ipc:
            self._cache.read_blocks(layer, self._ids, self._shared.layer(layer))
        self._shared.flags[layer] = time.time_ns()

    def finish(self) -> None:
        """Wait until everything offered is out."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (layer := self._queue.get()) is not None:
            self.export(layer)


def time_handoff(bench: Bench) -> None:
    """Both data paths, and the tokens of one process to compare with."""
    model, cache, length = _build(bench)
    tokens = _prompt(bench, length)
    batch = batch_of([(0, length, _FIRST_BLOCK["decode"])], model.config.vocab_size, tokens)
    first = int(model.forward(batch, cache)[-1].argmax())
    wanted = _decode(model, cache, length, first)
    for name, is_ipc in (("shm", False), ("cuda_ipc", True)):
        if is_ipc and bench.is_rehearsal:
            continue
        run = partial(_run, bench, model, cache, length, wanted, name, is_ipc)
        bench.attempt("handoff", f"handoff {name}", run)


def _run(
    bench: Bench, model: CudaModel, cache: DeviceKvCache, length: int, wanted: list[int], name: str, is_ipc: bool
) -> None:
    ids = _blocks("decode", length)
    layer_bytes = len(ids) * cache.layout.block_bytes
    num_layers = model.config.num_layers
    with _shared_file(_FLAG_BYTES + num_layers * layer_bytes) as path, _prefill_process(bench, path, is_ipc) as process:
        shared = SharedLayers(path, num_layers, layer_bytes)
        stdin, stdout = _pipes(process)
        ready = _hear(stdout)
        source = None
        if is_ipc:
            source = _open_handle(ready["handle"], tuple(cache.bytes.shape), bench.device)
        for layer in range(num_layers):  # once before it counts, and whatever is there must not help
            cache.write_blocks(layer, ids, shared.layer(layer))
        cache.bytes[:, ids[0] : ids[-1] + 1] = 0x7F
        bench.synchronize()
        shared.flags[:] = 0
        stdin.write("go\n")
        stdin.flush()
        for layer in range(num_layers):
            shared.wait(layer)
            if source is None:
                cache.write_blocks(layer, ids, shared.layer(layer))
            else:
                _import_ipc(cache, layer, ids, source[layer])
        bench.synchronize()
        imported = time.time_ns()
        done = _hear(stdout)
        tokens = _decode(model, cache, length, int(str(done["first_token"])))
        stdin.write("end\n")
        stdin.flush()
        computed, started = int(str(done["computed_ns"])), int(str(done["started_ns"]))
        bench.emit(
            "handoff",
            f"handoff {name}",
            ok=tokens == wanted,
            num_tokens=length,
            kv_mib=num_layers * layer_bytes / 2**20,
            prefill_ms=(computed - started) / 1e6,
            total_ms=(imported - started) / 1e6,
            exposed_ms=max(0, imported - computed) / 1e6,
        )
        del source


def _build(bench: Bench) -> tuple[CudaModel, DeviceKvCache, int]:
    config = config_of(bench, _LAYERS)
    model = cuda_model(bench, config, WeightFormat.DENSE)
    length = bench.size(2048, 40)
    cache = new_cache(bench, model, max(_FIRST_BLOCK.values()) + -(-(length + _NUM_TOKENS) // 16) + 1)
    return model, cache, length


def _prompt(bench: Bench, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, bench.size(128256, 300), (length,), generator=generator)


def _blocks(role: str, length: int) -> list[int]:
    return list(range(_FIRST_BLOCK[role], _FIRST_BLOCK[role] + -(-length // 16)))


def _decode(model: CudaModel, cache: DeviceKvCache, length: int, first_token: int) -> list[int]:
    """Greedy tokens behind a prompt whose KV is in the decode blocks."""
    tokens = [first_token]
    for position in range(length, length + _NUM_TOKENS - 1):
        token = torch.tensor([tokens[-1]])
        batch = batch_of([(position, 1, _FIRST_BLOCK["decode"])], model.config.vocab_size, token)
        tokens.append(int(model.forward(batch, cache)[0].argmax()))
    return tokens


def _import_ipc(cache: DeviceKvCache, layer: int, ids: Sequence[int], source_rows: Tensor) -> None:
    """Copy blocks from the other process's cache, device to device."""
    layout = cache.layout
    source = LayerCache.from_bytes(
        source_rows, layout.num_kv_heads, layout.block_size, layout.head_dim, cache.elements.dtype
    )
    offsets = torch.arange(layout.block_size)
    count = len(ids)
    source_slots, target_slots = (
        ((torch.arange(count) + first)[:, None] * layout.block_size + offsets).flatten().to(source_rows.device)
        for first in (_FIRST_BLOCK["prefill"], _FIRST_BLOCK["decode"])
    )
    copy_kv(source, source_slots, cache.layer_cache(layer), target_slots)


def _handle(tensor: Tensor) -> list[str | int | bool]:
    """The device memory's handle for another process, as text."""
    fields = tensor.untyped_storage()._share_cuda_()
    return [field.hex() if isinstance(field, bytes) else field for field in fields]


def _open_handle(handle: object, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The other process's cache [num_layers, num_blocks, block_bytes]."""
    if not isinstance(handle, list):
        raise TypeError("the prefill process gave no handle")
    fields = [bytes.fromhex(field) if isinstance(field, str) else field for field in handle]
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[: int(np.prod(shape))].view(shape)


@contextmanager
def _shared_file(num_bytes: int) -> Iterator[Path]:
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    descriptor, name = tempfile.mkstemp(dir=folder)
    try:
        os.ftruncate(descriptor, num_bytes)
        os.close(descriptor)
        yield Path(name)
    finally:
        Path(name).unlink()


@contextmanager
def _prefill_process(bench: Bench, path: Path, is_ipc: bool) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.gpu_handoff", str(path), "ipc" if is_ipc else "shm"]
    command.append("rehearsal" if bench.is_rehearsal else "device")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the prefill process has no pipes")
    return process.stdin, process.stdout


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _hear(stdout: IO[str]) -> dict[str, object]:
    line = stdout.readline()
    if not line:
        raise RuntimeError("the prefill process ended")
    message: dict[str, object] = json.loads(line)
    return message


if __name__ == "__main__":
    _is_rehearsal = sys.argv[3] == "rehearsal"
    _bench = Bench(
        device=torch.device("cpu" if _is_rehearsal else "cuda"),
        is_rehearsal=_is_rehearsal,
        is_warm_up=False,
        out=Path(os.devnull),
        ceilings=Ceilings(1.0, 1.0),
    )
    run_prefill(_bench, Path(sys.argv[1]), is_ipc=sys.argv[2] == "ipc")
