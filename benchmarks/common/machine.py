"""What a run was measured on: processor, cores, memory, kernel, commit. Never host names or paths."""

import os
import platform
import subprocess
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "asimddp", "i8mm", "sve")
_GIBIBYTE = 1 << 30


def describe_machine() -> dict[str, str | int | float | list[str]]:
    """Return the machine as the reports show it.

    `load_average_1m` tells whether something else was running when the report was made.
    """
    model, flags = _cpu()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model or platform.machine(),
        "cpu_features": [flag for flag in _ISA_FLAGS if flag in flags],
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / _GIBIBYTE, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_1m": round(os.getloadavg()[0], 2),
    }


def _cpu() -> tuple[str, frozenset[str]]:
    model, flags = "", frozenset[str]()
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = model or value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = flags or frozenset(value.split())
    return model, flags


def commit_id() -> str:
    """Return the commit that runs, `-dirty` behind it if files differ, or `unknown` outside a repository."""
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    return commit + ("-dirty" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    # A checkout of another user is still read, and nothing is written, not even the index.
    command = ["git", "--no-optional-locks", "-c", f"safe.directory={_ROOT}", *arguments]
    try:
        done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
