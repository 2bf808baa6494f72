"""When a step counts as stalled: by the limit, by what this worker's steps take, and not for ever."""

import asyncio
import subprocess
import sys

import pytest

from worker.step_watch import HALF_LIFE_S, SLOWNESS_FACTOR, StepWatch


class Bench:
    """A watch over a step whose age is written down."""

    def __init__(self, stall_s: float = 2.0) -> None:
        self.age_s = 0.0
        self.changes: list[bool] = []
        self.watch = StepWatch(lambda: self.age_s, stall_s, None, self.changes.append)

    def look(self, age_s: float) -> None:
        self.age_s = age_s
        self.watch._look()


def test_step_beyond_the_limit_is_stalled_until_it_ends() -> None:
    bench = Bench()
    for age_s in (0.0, 1.0, 2.0):
        bench.look(age_s)
    assert bench.changes == []
    bench.look(2.1)
    assert bench.changes == [True]
    bench.look(0.0)
    assert bench.changes == [True, False]
    assert not bench.watch.is_stalled


def test_slow_worker_is_not_stalled_for_being_as_slow_as_always() -> None:
    bench = Bench()
    bench.look(1.5)
    bench.look(0.0)
    bench.look(SLOWNESS_FACTOR * 1.4)
    assert not bench.watch.is_stalled
    bench.look(SLOWNESS_FACTOR * 1.6)
    assert bench.watch.is_stalled


def test_one_long_hang_does_not_excuse_the_next_for_ever() -> None:
    bench = Bench()
    bench.look(60.0)
    bench.look(0.0)
    bench.look(100.0)
    assert not bench.watch.is_stalled
    bench.look(0.0)
    for _ in range(int(10 * HALF_LIFE_S / 0.25)):
        bench.look(0.0)
    bench.look(3.0)
    assert bench.watch.is_stalled


@pytest.mark.parametrize("hang", ["time.sleep(60)", "import ctypes; ctypes.PyDLL(None).sleep(60)"])
def test_watchdog_ends_the_process_even_where_no_python_can_run(hang: str) -> None:
    """The second hang keeps the interpreter's lock, as a native kernel may."""
    script = f"""
import asyncio, threading, time
from worker.step_watch import StepWatch

started = None

def step():
    global started
    time.sleep(0.3)
    started = time.monotonic()
    {hang}

async def main():
    watch = StepWatch(lambda: 0.0 if started is None else time.monotonic() - started, 0.5, 1.0, lambda stalled: None)
    threading.Thread(target=step, daemon=True).start()
    await watch.run()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 1
    assert "in step" in done.stderr


async def test_watchdog_lets_steps_follow_one_another() -> None:
    """Many short steps together are longer than the limit, and none of them is."""
    loop = asyncio.get_running_loop()
    watch = StepWatch(lambda: loop.time() % 0.05, 0.2, 1.2, lambda is_stalled: None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await watch.run()
