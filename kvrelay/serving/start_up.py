"""Signals while a process is still starting: imports, downloads, the model.

Owns their handlers until the server is there and takes them over (`kvrelay/serving/server.py`). Without them the kernel
ends a process at once, but not one with process id 1, as in a container: there a signal that nobody handles is lost.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stops_at_once(name: str, signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """End this process with exit code 0 at a signal inside the block: nothing runs yet that could be finished.

    To be entered before anything slow is imported or loaded. What can end in order replaces the handlers for as long
    as it runs. Outside the main thread, which alone can have handlers, nothing happens.

    Args:
        name: The program's name in the line that says why it ended.
        signals: Those that end it.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        # Not the log: the signal may have come while this very thread was writing to it. And not sys.exit: a model
        # that another thread is loading cannot be interrupted, and would be waited for.
        os.write(2, f"{name}: stopped by {signal.Signals(number).name} before it was ready\n".encode())
        os._exit(0)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
