"""Layers are reported in order, on another thread, once the device has written them; failures reach the engine."""

import threading
from functools import partial

import pytest

from engine.model.cuda.reports import LayerReports


def wait_for(event: threading.Event) -> None:
    assert event.wait(5.0)


pytestmark = pytest.mark.usefixtures("no_leaks")


async def test_layers_are_reported_in_order_once_they_are_written() -> None:
    reports, written = LayerReports(), [threading.Event() for _ in range(3)]
    seen: list[int] = []
    threads: set[int] = set()

    def on_layer(layer: int) -> None:
        seen.append(layer)
        threads.add(threading.get_ident())

    for layer, event in enumerate(written):
        reports.report(partial(wait_for, event), layer, on_layer)
    written[1].set()
    assert seen == []  # layer 1 comes after layer 0, however long that takes
    written[0].set()
    written[2].set()
    reports.finish()
    assert seen == [0, 1, 2]
    assert threading.get_ident() not in threads
    reports.close()


async def test_finish_waits_for_the_last_report_and_not_longer() -> None:
    reports, gate, is_done = LayerReports(), threading.Event(), threading.Event()
    reports.report(partial(wait_for, gate), 0, lambda layer: None)

    def finish() -> None:
        reports.finish()
        is_done.set()

    waiter = threading.Thread(target=finish)
    waiter.start()
    assert not is_done.wait(0.05)
    gate.set()
    assert is_done.wait(5.0)
    waiter.join()
    reports.finish()
    reports.close()


async def test_a_failure_is_raised_by_finish_and_leaves_out_what_follows() -> None:
    reports = LayerReports()
    seen: list[int] = []

    def fail() -> None:
        raise RuntimeError("the device is gone")

    reports.report(lambda: None, 0, seen.append)
    reports.report(fail, 1, seen.append)
    reports.report(lambda: None, 2, seen.append)
    with pytest.raises(RuntimeError, match="the device is gone"):
        reports.finish()
    assert seen == [0]
    # The next step begins anew.
    reports.report(lambda: None, 0, seen.append)
    reports.finish()
    assert seen == [0, 0]
    reports.close()


async def test_nothing_to_report_starts_no_thread() -> None:
    reports = LayerReports()
    reports.finish()
    reports.close()
