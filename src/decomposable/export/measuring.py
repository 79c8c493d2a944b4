"""Timing the sizes of a decomposed network, in PyTorch or in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from decomposable.errors import InvalidArgumentError
from decomposable.export.runners import runners
from decomposable.network.calls import Call, InputSpec
from decomposable.network.decomposed import DecomposedNet
from decomposable.sizing.latency import Entry
from decomposable.sizing.plans import RankPlan
from decomposable.sizing.sweep import Runs, sweep


def measure(
    net: DecomposedNet,
    sizes: Sequence[float] | None = None,
    *,
    runtime: str = "torch",
    batch: int = 1,
    threads: int | None = None,
    seconds: float = 10.0,
    align: int | Literal["auto", "measured"] | None = None,
    input: InputSpec | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Entry:
    """Time the original network and several sizes of it on this machine's processor, interleaved.

    Args:
        net: it stays as it is.
        sizes: budgets as in ``resize_(macs=...)`` (``params=`` where MACs are not known); by default a few usual ones.
        runtime: "torch", as `extract` gives the network, in inference mode; or "onnxruntime", as it is exported.
        batch: samples that one pass takes.
        threads: by default as many as PyTorch uses.
        seconds: about how long to measure; every size runs at least 5 times.
        align: what ranks are rounded to; "measured" tries several multiples first and takes the fastest.
        input: what the network takes, where it was decomposed without an example input.
        say: told what is going on.
    """
    call = net.call if input is None else Call.with_first(input)
    if call is None:
        why = net.unclear or "the network was decomposed without an example_input"
        raise InvalidArgumentError(f"input= is needed: {why}; allowed: an InputSpec")
    count = torch.get_num_threads() if threads is None else threads

    @contextmanager
    def making(plans: Mapping[str, RankPlan]) -> Iterator[Runs]:
        say(f"{runtime}: making {len(plans)} sizes")
        modules = {name: net.extract(plan) for name, plan in plans.items()}
        with runners(runtime, modules, call, batch=batch, threads=count) as runs:
            say(f"{runtime}: timing {len(runs)} sizes side by side")
            yield runs

    return sweep(net.selector, making, sizes, runtime=runtime, batch=batch, threads=count, seconds=seconds, align=align)
