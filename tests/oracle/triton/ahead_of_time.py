"""Compiles kernels for a named GPU on a machine that has none: `python -m tests.oracle.triton.ahead_of_time sm_90`.

Launchers are called as in production, with tensors that have shapes but no memory, while launches are recorded instead
of run. Each recorded launch is then compiled to machine code with the argument types, constants and divisibility that
the real launch would give it. Prints one JSON object a launch: name, and either the error or registers, spills and
shared memory. Runs in a process of its own, without the interpreter.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.oracle.triton.production_launches import LAUNCHES, Launch

_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(slots=True)
class Recorded:
    """One launch: what `triton.compile` needs to know of it."""

    kernel: triton.JITFunction
    signature: dict[str, str] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    attributes: dict[tuple[int, ...], list[list[object]]] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)


@contextmanager
def recorded_launches() -> Iterator[list[Recorded]]:
    """Collect launches instead of running them."""
    launches: list[Recorded] = []

    def record(kernel: triton.JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        launches.append(_describe(kernel, args, kwargs))

    run = triton.JITFunction.run
    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = run


def _describe(kernel: triton.JITFunction, args: tuple[object, ...], kwargs: dict[str, object]) -> Recorded:
    values = dict(zip(kernel.arg_names, args, strict=False))
    launch = Recorded(kernel, options={name: value for name, value in kwargs.items() if name not in kernel.arg_names})
    values |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    for index, parameter in enumerate(kernel.params):
        value = values.get(parameter.name, parameter.default)
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            launch.signature[parameter.name] = "constexpr"
            launch.constants[parameter.name] = value
            continue
        if isinstance(value, torch.Tensor):
            launch.signature[parameter.name] = "*" + _TYPES[value.dtype]
            is_aligned = True  # what torch allocates
        elif isinstance(value, float):
            launch.signature[parameter.name], is_aligned = "fp32", False
        elif isinstance(value, int):
            launch.signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            is_aligned = value % 16 == 0
        else:
            raise TypeError(f"{kernel.__name__} takes {parameter.name} = {value!r}")
        if is_aligned and not parameter.do_not_specialize:
            launch.attributes[(index,)] = [["tt.divisibility", 16]]
    return launch


def compile_launch(launch: Recorded, capability: int) -> dict[str, object]:
    """Machine code for one launch; its resources, or the error."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    except BaseException as error:  # the compiler has no common base class, and every failure is a finding
        while error.__cause__ is not None:  # of an error inside a device function the innermost names the reason
            error = error.__cause__
        return {"error": f"{type(error).__name__}: {str(error)[-400:]}"}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [str(_CUOBJDUMP), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    return {
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"],
        "shared_bytes": compiled.metadata.shared,
        "matrix_instructions": sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\b", compiled.asm["ptx"]))),
    }


def main(target: str, names: list[str]) -> None:
    """Compile the named production launches, or all of them, for a target such as `sm_90`."""
    capability = int(target.removeprefix("sm_"))
    for name, production in LAUNCHES.items():
        if (names and not any(part in name for part in names)) or capability < production.least_capability:
            continue
        for recorded in record_production(production):
            report = {"name": name, "kernel": recorded.kernel.__name__, **compile_launch(recorded, capability)}
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()


def record_production(production: Launch) -> list[Recorded]:
    """The launches that one call of a launcher makes."""
    with recorded_launches() as launches:
        production.call()
    return launches


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
