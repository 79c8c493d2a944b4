"""How long the sizes of a bundle take on this device: the entry of a latency profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from decomposable.checks import check_count
from decomposable.edge.arrays import Array
from decomposable.edge.bundle import Port
from decomposable.errors import InvalidArgumentError
from decomposable.sizing.latency import Entry
from decomposable.sizing.plans import RankPlan
from decomposable.sizing.ranks import RankSelector
from decomposable.sizing.sweep import Runs, sweep

RUNTIME = "onnxruntime"
Run = Callable[[dict[str, Array]], object]


def example(ports: Sequence[Port], batch: int, lengths: Mapping[str, int] | None = None) -> dict[str, Array]:
    """Inputs of so many samples, the same ones every time: normal numbers, or such as they may be where they are whole.

    `lengths` says how long the axes are that vary besides the batch.

    >>> example([Port(name="x", shape=("batch", 3, 8, 8), dtype="float32")], 2)["x"].shape
    (2, 3, 8, 8)
    """
    check_count("batch", batch)
    random = np.random.default_rng(0)
    feeds = {}
    for port in ports:
        named = [batch, *port.shape[1:]] if port.shape and not isinstance(port.shape[0], int) else list(port.shape)
        shape = [size if isinstance(size, int) else (lengths or {}).get(size, -1) for size in named]
        if -1 in shape:
            raise InvalidArgumentError(
                f"measure: '{port.name}' has the shape {port.shape}; allowed: a batch that varies, and axes of which "
                "the file says a length"
            )
        is_whole = np.dtype(port.dtype).kind != "f"
        least, most = port.values
        with _refusing(f"batch={batch!r:.40}: there is no such batch here"):
            values = random.integers(least, most + 1, shape) if is_whole else random.standard_normal(shape)
            feeds[port.name] = values.astype(port.dtype)
    return feeds


@contextmanager
def _refusing(text: str) -> Iterator[None]:
    """What does not fit into memory, in one line: numpy and ONNX Runtime have many errors for it."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise InvalidArgumentError(f"{text} ({type(error).__name__}: {reason})") from error


def time_sizes(
    selector: RankSelector,
    open_size: Callable[[RankPlan], Run],
    feeds: dict[str, Array],
    sizes: Sequence[float] | None,
    *,
    batch: int,
    threads: int,
    seconds: float,
    align: int | str | None,
) -> Entry:
    """Time the full size and some others side by side, each in a session of its own."""

    @contextmanager
    def making(plans: Mapping[str, RankPlan]) -> Iterator[Runs]:
        opened = {name: open_size(plan) for name, plan in plans.items()}
        runs = {name: partial(run, feeds) for name, run in opened.items()}
        with _refusing(f"batch={batch}: ONNX Runtime cannot run the network on it"):
            for run in runs.values():
                run()
        yield runs

    return sweep(selector, making, sizes, runtime=RUNTIME, batch=batch, threads=threads, seconds=seconds, align=align)
