"""LayerReports: tells that the device has written a layer, from a thread that waits for it in the engine's stead.

The engine's thread queues a step's launches far ahead of the device. Waiting for a layer there would stop that, and
waiting where the blocks are sent would stop the event loop. Knows neither devices nor blocks.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue


@dataclass(frozen=True, slots=True)
class _Report:
    wait: Callable[[], None]
    layer: int
    on_layer: Callable[[int], None]


class LayerReports:
    """Reports in the order in which they were asked for. Used by one thread; its own is started by the first report."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Report | threading.Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def report(self, wait: Callable[[], None], layer: int, on_layer: Callable[[int], None]) -> None:
        """Call `on_layer(layer)` on the reporting thread once `wait` has returned there."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="layer-reports", daemon=True)
            self._thread.start()
        self._queue.put(_Report(wait, layer, on_layer))

    def finish(self) -> None:
        """Return when everything asked for so far has been reported.

        Raises:
            Exception: What a `wait` or an `on_layer` raised; reports behind it were left out.
        """
        if self._thread is None:
            return
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Report what is queued and end the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif self._failure is None:
                try:
                    item.wait()
                    item.on_layer(item.layer)
                except BaseException as error:  # handed to the thread that waits in `finish`
                    self._failure = error
