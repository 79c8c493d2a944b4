"""What an export is made of: the network at the size that is asked for, as a plain module, and what it takes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.errors import InvalidArgumentError
from decomposable.export.program import ready
from decomposable.methods.sized import Size, SizedNet
from decomposable.network import DecomposedNet
from decomposable.parts import InputSpec
from decomposable.ranks import RankPlan
from decomposable.tracing import first_entry, other_macs, trace

_OF_SIZED = ("macs", "params")


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A module that is `ready`, its counts, and the inputs that it is tried with.

    Attributes:
        ranks: of every decomposed layer; None for a network that is not decomposed.
        rows: samples to try it with; None where made-up ones will do.
    """

    module: nn.Module
    macs: int | None
    params: int
    full_macs: int | None
    full_params: int
    ranks: Mapping[str, int] | None
    input: InputSpec
    rows: Tensor | None

    def batch(self, count: int) -> Tensor:
        """So many samples; those given begin anew where they are fewer."""
        return samples(self.input, self.rows, count)


def samples(input: InputSpec, rows: Tensor | None, count: int) -> Tensor:
    """So many of the rows, which begin anew where they are fewer; made-up ones where there are none."""
    return input.example(count) if rows is None else rows[torch.arange(count) % len(rows)]


def subject_of(
    net: nn.Module, size: Mapping[str, Any], example_input: Any, *, runtime: str, batch: int | None = None
) -> Subject:
    """The network at the size that options of `resize_` ask for; `net` stays as it is.

    Where all of them are None, that is the size in force, and a module that is no such network as it is. A time is one
    in the `runtime` that the export is for.
    """
    asked = {name: value for name, value in size.items() if value is not None}
    if not isinstance(net, DecomposedNet | SizedNet):
        if asked:
            raise InvalidArgumentError(
                f"{next(iter(asked))}: got it for a {type(net).__name__}, which has one size; allowed: a network of "
                "decompose() or load() that has several"
            )
        return _plain(net, input_of(None, example_input), example_input)
    if isinstance(net, SizedNet):
        other = next((name for name in asked if name not in _OF_SIZED), None)
        if other is not None:
            raise InvalidArgumentError(f"{other}: not for a network of the method {net.method}; allowed: macs, params")
    known = _noted_input(net) if isinstance(net, SizedNet) else net.input
    input = input_of(known, example_input)
    is_counted = known is None or input.shape == known.shape  # MACs are those at the size of image that was counted
    plan, module = _sized(net, asked) if isinstance(net, SizedNet) else _decomposed(net, asked, runtime, batch)
    return Subject(
        module=ready(module),
        macs=plan.macs if is_counted else None,
        params=plan.params,
        full_macs=plan.full_macs if is_counted else None,
        full_params=plan.full_params,
        ranks=getattr(plan, "ranks", None),
        input=input,
        rows=rows_of(example_input),
    )


def _decomposed(
    net: DecomposedNet, size: Mapping[str, Any], runtime: str, batch: int | None
) -> tuple[RankPlan, nn.Module]:
    if not size:
        return net.plan, net.extract()
    plan = net.choose(**size, runtime=runtime, batch=batch)
    net.warn_if_not_calibrated(plan, stacklevel=5)  # the line that called for the export
    return plan, net.extract(plan)


def _sized(net: SizedNet, size: Mapping[str, Any]) -> tuple[Size, nn.Module]:
    twin = copy.copy(net)  # shares everything but the size in force
    twin.__dict__["_modules"] = dict(net._modules)
    plan = twin.resize_(**size) if size else net.plan
    return plan, twin.extract()


def _plain(module: nn.Module, input: InputSpec, example_input: Any) -> Subject:
    """A module of one size; its MACs are counted."""
    plain = ready(module)
    params = sum(p.numel() for p in plain.parameters())
    subject = Subject(
        module=plain,
        macs=None,
        params=params,
        full_macs=None,
        full_params=params,
        ranks=None,
        input=input,
        rows=rows_of(example_input),
    )
    try:
        macs = other_macs(plain, (), trace(plain, subject.batch(1)))
    except Exception:  # a model that cannot run is refused later, in better words
        return subject
    return Subject(**{**vars(subject), "macs": macs, "full_macs": macs})


def input_of(known: InputSpec | None, example_input: Any) -> InputSpec:
    """What a network takes: what the example input says, or else what is known."""
    found = known if example_input is None else InputSpec.of(example_input)
    if found is None:
        got = "none" if example_input is None else type(example_input).__name__
        raise InvalidArgumentError(
            f"example_input is needed, because the network does not know what it takes; got {got}; "
            "allowed: a batch as a tensor, or with one as its first entry"
        )
    return found


def _noted_input(net: SizedNet) -> InputSpec | None:
    """What a method noted about the images that it was trained with."""
    places = (net.structure, net.info)
    shape = next((place["input_shape"] for place in places if "input_shape" in place), None)
    tensor = next(net.parameters(), None)
    if not isinstance(shape, list | tuple) or not shape or tensor is None:
        return None
    return InputSpec(shape=tuple(shape), dtype=str(tensor.dtype).removeprefix("torch."))


def rows_of(example_input: Any) -> Tensor | None:
    """The samples of an example input, on the CPU."""
    first = first_entry(example_input)
    return first.detach().cpu() if isinstance(first, Tensor) and first.dim() and len(first) else None
