"""Compiles the native kernels with the system's compiler at first use and keeps the result for every later process.

The library lies in `$XDG_CACHE_HOME/kvrelay` (`~/.cache/kvrelay`), a folder that only its owner can enter, under a name
that hashes sources, compiler and flags; a changed source is a new file. Processes that start together wait for one
build. Which functions the library has is `library.py`'s matter.
"""

import fcntl
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import cache
from pathlib import Path

import structlog
import xxhash

_log = structlog.get_logger(__name__)

SOURCES = Path(__file__).with_name("src")
ISA_VARIABLE = "KVRELAY_CPU_ISA"
_X86 = ("x86_64", "AMD64")
COMPILERS = ("c++", "g++", "clang++")
_BUILD_LIMIT_S = 120
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-pthread",
    "-fvisibility=hidden",
    # The sources say which products are fused; anything else would make results depend on compiler and CPU.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-w",
)


class KernelsUnavailable(Exception):
    """The native kernels cannot be had here; the message says why. The torch path takes over."""


class Isa(StrEnum):
    """Instruction sets that the sources have variants for. Results are the same bits in all of them."""

    AVX512VNNI = "avx512vnni"
    AVXVNNI = "avxvnni"
    AVX2 = "avx2"
    PORTABLE = "portable"


_AVX2_FEATURES = frozenset({"avx2", "fma", "f16c", "bmi2"})
_FEATURES = {
    Isa.AVX512VNNI: _AVX2_FEATURES | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni"},
    Isa.AVXVNNI: _AVX2_FEATURES | {"avxvnni"},
    Isa.AVX2: _AVX2_FEATURES,
    Isa.PORTABLE: frozenset[str](),
}
"""Compiler names of the features that a variant needs, best variant first."""
_EXTRA_FEATURES = {(Isa.AVX512VNNI, "GenuineIntel"): frozenset({"gfni"})}
"""Those that a variant uses where they are, by the CPU's maker. Zen 4 has gfni, too, but in its product units."""
_KERNEL_NAMES = {"avxvnni": "avx_vnni", "avx512vnni": "avx512_vnni"}
"""Where /proc/cpuinfo spells a feature otherwise."""


def choose_isa() -> Isa:
    """Return the best variant of this CPU, or the one that the environment variable KVRELAY_CPU_ISA names.

    Raises:
        KernelsUnavailable: The variable names no variant, or one that this CPU cannot run.
    """
    flags = _cpu_flags()
    runnable = [isa for isa in Isa if all(_KERNEL_NAMES.get(name, name) in flags for name in _FEATURES[isa])]
    wanted = os.environ.get(ISA_VARIABLE)
    if not wanted:
        return runnable[0]
    if wanted not in runnable:
        raise KernelsUnavailable(f"{ISA_VARIABLE}={wanted}: this CPU runs {', '.join(runnable)}")
    return Isa(wanted)


def variants() -> tuple[Isa, ...]:
    """Return the variants that CPUs of this machine's kind may run, whichever of them this one does."""
    return tuple(Isa) if platform.machine() in _X86 else (Isa.PORTABLE,)


def build_library(isa: Isa) -> Path:
    """Return the compiled library of a variant, compiling it if no process has yet.

    Raises:
        KernelsUnavailable: There is no compiler, it fails, or the cache cannot be used.
    """
    compiler = _compiler()
    extra = _EXTRA_FEATURES.get((isa, _cpu_info().get("vendor_id", "")), frozenset[str]())
    features = _FEATURES[isa] | (extra & _cpu_flags())
    command = [compiler, *_FLAGS, *(f"-m{name}" for name in sorted(features)), str(SOURCES / "api.cpp")]
    key = _fingerprint(compiler, command)
    try:
        folder = _cache_folder()
        path = folder / f"cpu-{isa}-{key}.so"
        if not _is_ours(path):
            with _locked(folder / f"{path.name}.lock"):
                if not _is_ours(path):  # nobody built it while this process waited
                    _compile(command, path)
    except OSError as error:
        raise KernelsUnavailable(f"the cache of compiled kernels cannot be used: {error}") from error
    return path


def check_compiler() -> Isa:
    """Return the variant that would be compiled here, without compiling it.

    Raises:
        KernelsUnavailable: There is no compiler, or no such variant.
    """
    _compiler()
    return choose_isa()


def _compile(command: list[str], path: Path) -> None:
    _log.info("kernels.compiling", library=path.name)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        # The command is ours: a compiler found on PATH or named by CXX, fixed flags and our own sources.
        run = subprocess.run(
            [*command, "-o", unfinished], check=False, capture_output=True, text=True, timeout=_BUILD_LIMIT_S
        )
        if run.returncode:
            raise KernelsUnavailable(f"{command[0]} failed: {_first_error(run.stderr)}")
        Path(unfinished).replace(path)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{command[0]} took longer than {_BUILD_LIMIT_S} s") from error
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _first_error(output: str) -> str:
    lines = output.strip().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no message")


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise KernelsUnavailable("no C++ compiler: none of CXX, " + ", ".join(COMPILERS) + " is on PATH")


@cache
def _compiler_version(compiler: str, changed_ns: int) -> str:
    del changed_ns  # a part of the key only: another compiler under the same name
    run = subprocess.run([compiler, "--version"], check=False, capture_output=True, text=True, timeout=_BUILD_LIMIT_S)
    return run.stdout


def _fingerprint(compiler: str, command: list[str]) -> str:
    digest = xxhash.xxh3_128()
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    digest.update("\0".join(command[1:-1]).encode())
    digest.update(_compiler_version(compiler, Path(compiler).stat().st_mtime_ns).encode())
    return digest.hexdigest()


def _cache_folder() -> Path:
    """The private cache folder; refuses one that others could put a library into."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "kvrelay"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelsUnavailable(f"{folder} must belong to this user and be writable for nobody else")
    return folder


def _is_ours(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and status.st_size > 0


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes; the kernel gives it back if the holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _cpu_flags() -> frozenset[str]:
    """Features of the CPU as the kernel names them; empty where there are no variants for the machine."""
    return frozenset(_cpu_info().get("flags", "").split())


@cache
def _cpu_info() -> dict[str, str]:
    """What the kernel says of the first core, by name; empty where there are no variants for the machine."""
    if platform.machine() not in _X86:
        return {}
    try:
        first_core = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first_core.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}
