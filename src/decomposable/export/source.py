"""What an export is made of: the network at the size that is asked for, as a plain module, and what it takes."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decomposable.core.tracing import Forward, call_with_first, on_device_of, other_macs, trace
from decomposable.export.interface import Feeds, Interface
from decomposable.export.program import ExportError, ready
from decomposable.export.quiet import refusing
from decomposable.export.report import Counts
from decomposable.network.calls import CallSignature
from decomposable.network.capture import Captured, Watch, first_captured
from decomposable.network.decomposed import DecomposedNet
from decomposable_edge.errors import ExampleNeededError, InvalidArgumentError
from decomposable_edge.sizing.plans import SizeRequest


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportSource:
    """A module that is `ready`, its counts, and what it takes."""

    module: nn.Module
    counts: Counts
    call: CallSignature
    rows: Feeds | None  # samples to try it with; None where made-up ones have to do


def check_ending(path: str | os.PathLike[str], ending: str) -> Path:
    """Return the path if it has this ending and its folder is there."""
    target = Path(path)
    if target.suffix != ending:
        raise InvalidArgumentError(f"path {target}: got the ending {target.suffix!r}; allowed: {ending}")
    if not target.parent.is_dir():
        raise InvalidArgumentError(f"path {target}: there is no folder {target.parent}; allowed: one that exists")
    if target.is_dir():
        raise InvalidArgumentError(f"path {target}: it is a folder; allowed: the name of a file")
    return target


def subject_of(
    net: nn.Module, request: SizeRequest, example_input: Any, forward: Forward | None = None, *, runtime: str
) -> ExportSource:
    """Return the network at the size that is asked for, by default the current one; `net` stays as it is.

    A time is one in the `runtime` that the export is for. `forward` says how a batch like the example input is used.
    """
    asked = [name for name in request.given() if name != "batch"]
    if not isinstance(net, DecomposedNet):
        if asked:
            raise InvalidArgumentError(
                f"{asked[0]}: got it for a {type(net).__name__}, which has one size; allowed: a network of "
                "decompose() or load() that has several"
            )
        return _plain(net, example_input, forward)
    known = known_of(net)
    if asked:
        plan = net.plan(**request.given(), runtime=runtime)
        net._warn_once(plan, stacklevel=4)  # the line that called for the export
    else:
        plan = net.plan()
    module = ready(net.extract(plan) if asked else net.extract())
    call, rows = taken_by(module, known, example_input, forward, net._forward)
    counts = Counts.of(plan, has_macs=known.call is None or same_shapes(known.call, call))
    return ExportSource(module=module, counts=counts, call=call, rows=rows)


def _plain(module: nn.Module, example_input: Any, forward: Forward | None) -> ExportSource:
    """Return a module of one size, whose MACs are counted."""
    module = ready(module)
    call, rows = taken_by(module, Captured(), example_input, forward, call_with_first)
    macs, params = None, sum(p.numel() for p in module.parameters())
    with suppress(Exception):  # a model that cannot run is refused later, in better words
        macs = other_macs((), trace(module, Interface(call=call).rows(rows, 1), call.run))
    counts = Counts(macs=macs, full_macs=macs, params=params, full_params=params, ranks=None)
    return ExportSource(module=module, counts=counts, call=call, rows=rows)


def taken_by(
    module: nn.Module, known: Captured, example_input: Any, forward: Forward | None, usual: Forward
) -> tuple[CallSignature, Feeds | None]:
    """Return how the network is called, and with which rows: as the example input says, or else as is known.

    `usual` is how its batches are used where `forward` does not say it.
    """
    found = known
    if example_input is not None:
        found = _captured(module, on_device_of(module, example_input), forward or usual)
    elif forward is not None:
        raise InvalidArgumentError("forward= says how a batch is used; allowed: together with example_input=")
    if found.unclear is not None:
        raise ExportError(
            f"export: {found.unclear}; allowed: forward= (with example_input=) that calls the network once, with "
            "tensors of the batch, such as lambda net, batch: net(**batch)"
        )
    if found.call is None:
        got = "none" if example_input is None else type(example_input).__name__
        raise ExampleNeededError(
            f"example_input is needed, because the network does not know what it takes; got {got}; "
            "allowed: a batch as a tensor, or with one as its first entry"
        )
    return found.call, found.rows


@torch.no_grad()
def _captured(module: nn.Module, batch: Any, forward: Forward) -> Captured:
    if forward is call_with_first:
        return first_captured(module, batch)
    watch = Watch(forward)
    with refusing(InvalidArgumentError, "example_input: forward= cannot run the network on it"):
        watch(module, batch)
    return watch.captured(module)


def same_shapes(call: CallSignature, other: CallSignature) -> bool:
    """Return whether two calls are of inputs of the same shapes."""
    return {k: v.shape for k, v in call.inputs.items()} == {k: v.shape for k, v in other.inputs.items()}


def known_of(net: DecomposedNet) -> Captured:
    """Return what a network knows of its inputs."""
    return Captured(call=net.call, rows=net._rows, unclear=net.unclear)
