"""Keeping PyTorch's exporters from talking: what they say to their own developers is no news to a user, or one line."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from decomposable_edge.errors import DecomposableError

_TALKATIVE = ("torch", "torch.onnx", "onnxscript", "onnx_ir")


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings, prints and log records of the exporters; other logging goes on."""
    with ExitStack() as stack, warnings.catch_warnings():
        stack.enter_context(redirect_stdout(_OtherThreads(sys.stdout)))
        stack.enter_context(redirect_stderr(_OtherThreads(sys.stderr)))
        warnings.simplefilter("ignore")
        loggers = list(logging.root.manager.loggerDict.items())  # PyTorch gives handlers to each of its parts
        parts = [name for name, one in loggers if getattr(one, "handlers", ()) and name.partition(".")[0] in _TALKATIVE]
        for name in (*_TALKATIVE, *parts):
            stack.enter_context(_mute(logging.getLogger(name)))
        yield


class _OtherThreads:
    """A stream that drops what the thread which made it writes, and passes on what others do."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() != self._thread:
            self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _mute(logger: logging.Logger) -> Iterator[None]:
    """Mute a logger by its handlers: records of its children pass by its level, but not by them."""
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before


def reason(error: BaseException) -> str:
    """Return the first line of an error's first cause: exporters wrap it, and add pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {line[:200]}" if line else type(error).__name__


@contextmanager
def refusing(
    kind: type[DecomposableError], text: str, allowed: str = "", but: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Turn any failure of foreign code, `but` of one kind, into one line: it comes in many types and words."""
    try:
        yield
    except Exception as error:
        if but and isinstance(error, but):
            raise
        raise kind(f"{text} ({reason(error)}){allowed}") from error
