"""The first half of every export: a module as a `torch.export` program, whose batch and other axes may vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from decomposable.core.tree import deep_copy, rewire, unwrap
from decomposable.export.interface import BATCH, Feeds, Interface, Named, is_plain, plain, resized
from decomposable.export.quiet import quiet, reason
from decomposable.network.calls import INPUT, CallSignature
from decomposable_edge.errors import DecomposableError, InvalidArgumentError

_TRACED = 2  # an axis of one would be taken for a constant


class ExportError(DecomposableError):
    """A network cannot be exported, or what came out is not the same network."""


class FixedBatchError(ExportError):
    """A network runs at one batch size only."""


@torch.inference_mode(False)  # tensors made in that mode cannot be traced
def ready(module: nn.Module) -> nn.Module:
    """Return a copy on the CPU in eval mode: the module may be in training, on another device, or compiled.

    Its weights are contiguous: channels last would be traced as steps of its own.
    """
    plain = deep_copy(rewire(unwrap(module), {})).cpu().eval().requires_grad_(False)
    for tensor in (*plain.parameters(), *plain.buffers()):
        tensor.data = tensor.data.contiguous()
    return plain


def run(module: nn.Module, call: CallSignature, feeds: Feeds) -> list[Tensor]:
    """Return all tensors that a module gives, in order, without None, as an exported file does."""
    return tensors_of(_returned(module, call, feeds))


def output_names(module: nn.Module, interface: Interface, feeds: Feeds) -> tuple[str, ...]:
    """Return names of the outputs: by the keys of the model's dict, as in ``text.hidden``; or output_0 and on."""
    returned = plain(_returned(module, interface.call, feeds))
    count = len(tensors_of(returned))
    if isinstance(returned, Mapping):
        names = tuple(_keys(returned, ""))
        taken = {"", *interface.names}
        if len(set(names)) == count and all(isinstance(name, str) and name not in taken for name in names):
            return names
    stem = "output" if not any(name.startswith("output") for name in interface.names) else "result"
    return (stem,) if count == 1 else tuple(f"{stem}_{i}" for i in range(count))


def _keys(returned: Mapping[Any, Any], before: str) -> Iterator[Any]:
    for key, value in returned.items():
        if isinstance(value, Mapping) and isinstance(key, str):
            yield from _keys(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}" if isinstance(key, str) else key


@torch.no_grad()
def _returned(module: nn.Module, call: CallSignature, feeds: Feeds) -> Any:
    try:
        return call.run(module, feeds)
    except Exception as error:  # code of somebody else
        shapes = [f"'{name}' of shape {tuple(x.shape)} and type {x.dtype}" for name, x in feeds.items()]
        batch = " and ".join(shapes).removeprefix(f"'{INPUT}' of " if call.is_default else "")
        raise InvalidArgumentError(
            f"example_input: the model cannot run a batch of {batch} ({reason(error)})"
        ) from error


def tensors_of(returned: Any) -> list[Tensor]:
    """Return the tensors in what a model gives, in order."""
    found = [leaf for leaf in tree_leaves(plain(returned)) if leaf is not None]
    for leaf in found:
        if not isinstance(leaf, Tensor):
            raise ExportError(f"export: the model returns a value of type {type(leaf).__name__}; allowed: tensors")
    if not found:
        raise ExportError("export: the model returns no tensor; allowed: one or more")
    return found


def to_program(module: nn.Module, interface: Interface, rows: Feeds | None = None) -> tuple[ExportedProgram, Interface]:
    """Return the program of a module that is `ready`, and what it takes: without the inputs that it ignores."""
    program = _program(module, interface, rows)
    unused = _unused(program, interface)
    if unused and len(unused) < len(interface.names):
        interface = replace(interface, left_out=unused)
        program = _program(module, interface, rows)
    _check_axes(program, interface)
    return program, interface


def _program(module: nn.Module, interface: Interface, rows: Feeds | None) -> ExportedProgram:
    try:
        return _traced(module, interface, rows)
    except Exception as error:  # in whatever words the exporter refuses a model
        if interface.axes and _can_trace(module, replace(interface, axes={}), rows):
            raise ExportError(
                f"export: the model's code fixes an axis that dynamic= lets vary ({reason(error)}); allowed: dynamic= "
                f"without {' or '.join(interface.lengths)}{_or_with(interface)}"
            ) from error
        fixed = (replace(interface, axes={}, batch=count) for count in (_TRACED, 1))
        if interface.batch is None and any(_can_trace(module, one, rows) for one in fixed):
            raise FixedBatchError(
                f"export: the model's code fixes the size of the batch ({reason(error)}); allowed: batch=1 or another "
                "number, for a file that takes this one only"
            ) from error
        raise ExportError(f"export: torch.export cannot trace the model ({reason(error)})") from error


def _or_with(interface: Interface) -> str:
    """Name the other axes that are as long as those which vary: they may have to vary with them."""
    lengths = set(interface.lengths.values())
    others = [
        f"{name}:{at}"
        for name, spec in interface.call.inputs.items()
        for at, length in enumerate(spec.shape, start=1)
        if length in lengths and at not in interface.axes.get(name, {})
    ]
    return f", or with that of {', '.join(others)}, too" if others else ""


def _can_trace(module: nn.Module, interface: Interface, rows: Feeds | None) -> bool:
    try:
        _traced(module, interface, rows)
    except Exception:
        return False
    return True


@torch.inference_mode(False)
def _traced(module: nn.Module, interface: Interface, rows: Feeds | None) -> ExportedProgram:
    count, call = interface.batch or _TRACED, interface.call
    lengths = {axis: max(_TRACED, length) for axis, length in interface.lengths.items()}
    feeds = resized(interface.rows(rows, count), interface.axes, count, lengths)
    feeds = {name: feeds[name].clone() for name in interface.names}  # rows may be tensors of the inference mode
    batch = {0: Dim(BATCH)} if interface.batch is None else {}
    varying = {name: batch | dict.fromkeys(interface.axes.get(name, {}), Dim.DYNAMIC) for name in feeds}
    shapes: Any = varying if any(varying.values()) else None
    with quiet(), torch.no_grad():
        if call.is_default:
            args = tuple(feeds.values())
            if not interface.axes and is_plain(module(*args)):
                shapes = None if shapes is None else tuple(varying.values())
                return torch.export.export(module, args, dynamic_shapes=shapes, strict=False)
            return torch.export.export(Named(module, interface), args, dynamic_shapes=shapes, strict=False)
        return torch.export.export(Named(module, interface), (), feeds, dynamic_shapes=shapes, strict=False)


def _unused(program: ExportedProgram, interface: Interface) -> tuple[str, ...]:
    """Return the inputs on which no output depends."""
    nodes = {node.name: node for node in program.graph.nodes}
    reached, rest = set(), [node for node in program.graph.nodes if node.op == "output"]
    while rest:
        node = rest.pop()
        if node not in reached:
            reached.add(node)
            rest += node.all_input_nodes
    inputs = zip(interface.names, program.graph_signature.user_inputs, strict=True)
    return tuple(name for name, place in inputs if nodes.get(str(place)) not in reached)


def symbols(program: ExportedProgram, interface: Interface) -> dict[str, list[str]]:
    """Return what the exporter calls the axes that vary, by our names of them."""
    nodes = {node.name: node for node in program.graph.nodes}
    inputs = dict(zip(interface.names, program.graph_signature.user_inputs, strict=True))
    return {
        axis: [str(nodes[str(inputs[name])].meta["val"].shape[at]) for name, at in places]
        for axis, places in interface.places().items()
    }


def _check_axes(program: ExportedProgram, interface: Interface) -> None:
    """Refuse two names for what is always one length."""
    if not interface.axes:
        return
    seen: dict[str, str] = {}
    for axis, found in symbols(program, interface).items():
        for symbol in found:
            if not symbol.isdecimal() and seen.setdefault(symbol, axis) != axis:
                allowed = "dynamic= without it" if seen[symbol] == BATCH else "one name for both"
                raise InvalidArgumentError(
                    f"dynamic: '{axis}' is always as long as '{seen[symbol]}' in this network; allowed: {allowed}"
                )
