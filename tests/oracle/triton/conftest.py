"""Imports Triton and the kernels under its interpreter for the tests of this folder.

Triton decides when it is imported, and so does each kernel when its module is. Where another test's imports have loaded
Triton already (transformers does), it is loaded a second time: what holds the first copy keeps it. The variable is set
for these imports only, so that other tests and the processes they start see the environment as it was.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator

import pytest
import torch

_KERNELS = "engine.kernels.triton"
_USERS = ("engine.model.cuda", "engine.spec.device_sampling", "worker.compute.cuda_bootstrap")
"""Modules whose names begin so hold kernels."""


def _holds_kernels(name: str) -> bool:
    # The compiler's own extension knows no interpreter, and cannot be loaded twice.
    is_triton = name == "triton" or (name.startswith("triton.") and not name.startswith("triton._C"))
    return is_triton or name == _KERNELS or name.startswith((f"{_KERNELS}.", *_USERS))


for _name in [name for name in sys.modules if _holds_kernels(name)]:
    del sys.modules[_name]
_outer = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
try:
    for _module in pkgutil.iter_modules(importlib.import_module(_KERNELS).__path__, f"{_KERNELS}."):
        importlib.import_module(_module.name)
    # A launch imports this package lazily, and it too looks at the variable.
    importlib.import_module("triton.experimental.gluon")
finally:
    if _outer is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _outer


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Give new tensors NaN or the largest integer, so that what a kernel leaves unwritten shows in its result."""
    torch.use_deterministic_algorithms(True)  # which has `torch.empty` filled
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
