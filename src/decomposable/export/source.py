"""What an export is made of: the network at the size that is asked for, as a plain module, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from decomposable.core.tracing import Forward, call_with_first, on_device_of, other_macs, trace
from decomposable.export.interface import Feeds, Interface
from decomposable.export.program import ExportError, ready
from decomposable.export.quiet import refusing
from decomposable.network.calls import CallSignature
from decomposable.network.capture import Captured, Watch, first_captured
from decomposable.network.decomposed import DecomposedNet
from decomposable_edge.errors import ExampleNeededError, InvalidArgumentError
from decomposable_edge.sizing.chain import Rank
from decomposable_edge.sizing.plans import RankPlan, SizeRequest


@dataclass(frozen=True, kw_only=True, eq=False)
class ExportSource:
    """A module that is `ready`, its counts, and what it takes."""

    module: nn.Module
    macs: int | None
    params: int
    full_macs: int | None
    full_params: int
    ranks: Mapping[str, Rank] | None  # None for a network that is not decomposed
    call: CallSignature
    rows: Feeds | None  # samples to try it with; None where made-up ones have to do


def subject_of(
    net: nn.Module, request: SizeRequest, example_input: Any, forward: Forward | None = None, *, runtime: str
) -> ExportSource:
    """The network at the size that is asked for; `net` stays as it is.

    Where none is, that is the current size, and a module that is no such network as it is. A time is one in the
    `runtime` that the export is for. `forward` says how a batch like the example input is used.
    """
    asked = {name: value for name, value in request.given().items() if name != "batch"}
    if not isinstance(net, DecomposedNet):
        if asked:
            raise InvalidArgumentError(
                f"{next(iter(asked))}: got it for a {type(net).__name__}, which has one size; allowed: a network of "
                "decompose() or load() that has several"
            )
        return _plain(net, example_input, forward)
    known = known_of(net)
    plan, module = (net.plan(), net.extract()) if not asked else _resized(net, request, runtime)
    module = ready(module)
    found = taken_by(module, known, example_input, forward, net._forward)
    assert found.call is not None
    is_counted = known.call is None or same_shapes(known.call, found.call)  # MACs are those at the shapes then
    return ExportSource(
        module=module,
        macs=plan.macs if is_counted else None,
        params=plan.params,
        full_macs=plan.full_macs if is_counted else None,
        full_params=plan.full_params,
        ranks=plan.ranks,
        call=found.call,
        rows=found.rows,
    )


def _resized(net: DecomposedNet, request: SizeRequest, runtime: str) -> tuple[RankPlan, nn.Module]:
    """The size that a request asks for, and the network of it; the current one stays."""
    plan = net.plan(**request.given(), runtime=runtime)
    net._warn_once(plan, stacklevel=5)  # the line that called for the export
    return plan, net.extract(plan)


def _plain(module: nn.Module, example_input: Any, forward: Forward | None) -> ExportSource:
    """A module of one size; its MACs are counted."""
    plain = ready(module)
    found = taken_by(plain, Captured(), example_input, forward, call_with_first)
    call, rows, macs = found.call, found.rows, None
    assert call is not None
    params = sum(p.numel() for p in plain.parameters())
    with suppress(Exception):  # a model that cannot run is refused later, in better words
        macs = other_macs((), trace(plain, Interface(call=call).rows(rows, 1), call.run))
    return ExportSource(
        module=plain, macs=macs, params=params, full_macs=macs, full_params=params, ranks=None, call=call, rows=rows
    )


def taken_by(
    module: nn.Module, known: Captured, example_input: Any, forward: Forward | None, usual: Forward
) -> Captured:
    """How the network is called, and with which rows: what the example input says, or else what is known.

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
    return found


@torch.no_grad()
def _captured(module: nn.Module, batch: Any, forward: Forward) -> Captured:
    if forward is call_with_first:
        return first_captured(module, batch)
    watch = Watch(forward)
    with refusing(InvalidArgumentError, "example_input: forward= cannot run the network on it"):
        watch(module, batch)
    return watch.captured(module)


def same_shapes(call: CallSignature, other: CallSignature) -> bool:
    """Whether two calls are of inputs of the same shapes."""
    return {k: v.shape for k, v in call.inputs.items()} == {k: v.shape for k, v in other.inputs.items()}


def known_of(net: DecomposedNet) -> Captured:
    """What a network knows of its inputs."""
    return Captured(call=net.call, rows=net._rows, unclear=net.unclear)
