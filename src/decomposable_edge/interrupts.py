"""Stopping when asked to, at a place from which one can go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from decomposable_edge.errors import DecomposableError

_SECONDS_TO_END = 30.0


class Interrupted(DecomposableError):
    """A signal asked the run to stop; it can be resumed."""


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Have SIGINT and SIGTERM set the event, so that the work under way is finished; a second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread receives signals
        return

    def ask(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_signals_to_the_parent(worker: int = 0) -> None:
    """Keep a worker process alive when a signal goes to the whole group: the step that is finished needs its data.

    A second SIGTERM ends the worker: the parent sends it to those that do not end by themselves. So does time, because
    two signals that come at once are one.
    """
    seen = threading.Event()

    def end(*_: object) -> None:
        if seen.is_set():
            os._exit(1)
        seen.set()
        last_resort = threading.Timer(_SECONDS_TO_END, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end)
