"""A module as an ONNX graph: dynamic batch, plain names, and nothing of the machine that it was made on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decomposable import __version__
from decomposable.errors import MissingExtraError
from decomposable.export.program import ExportError, output_names, ready, to_program
from decomposable.export.quiet import quiet, reason
from decomposable.parts import InputSpec

if TYPE_CHECKING:
    import onnx

INPUT = "input"
MOST_BYTES = 2**31 - 1  # of one protobuf message
_BATCH = "batch"
_UNIQUE_INPUT = "decomposable::input"  # a parameter of the model may be called "input"


def require_onnx() -> None:
    """Raise where a package of the extra `onnx` is missing, before any work is done."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        try:
            import_module(package)
        except ImportError as error:
            raise MissingExtraError.of(package, "onnx") from error


def to_onnx(module: nn.Module, input: InputSpec, *, optimize: bool, batch: int | None = None) -> onnx.ModelProto:
    """The module as it is in eval mode, for any batch size or, where it is given, for that one.

    The initializers are called as in the state dict. With `optimize`, constants are computed and batch normalisation is
    folded into the layer before it, where it can be; without, every layer stays as the module has it.
    """
    require_onnx()
    plain = ready(module)
    tensors = {id(t): t for t in (*plain.parameters(), *plain.buffers())}
    _check_bytes(sum(t.numel() * t.element_size() for t in tensors.values()))
    names = output_names(plain, input.example(batch or 1))
    program = to_program(plain, input, batch=batch)
    try:
        with quiet():
            made = torch.onnx.export(
                program, dynamo=True, optimize=optimize, verbose=False, input_names=[_UNIQUE_INPUT]
            )
            assert made is not None
            model: onnx.ModelProto = made.model_proto
    except Exception as error:  # in whatever words the exporter refuses a model
        raise ExportError(f"export: the model has no ONNX form ({reason(error)})") from error
    if [value.name for value in model.graph.input] != [_UNIQUE_INPUT] or len(model.graph.output) != len(names):
        raise ExportError("export: the ONNX graph has other inputs and outputs than the model")
    _strip(model)
    _rename_values(model.graph, {_UNIQUE_INPUT: INPUT, **_distinct_outputs(model.graph, names)})
    if batch is None:
        _rename_batch(model.graph)
    model.producer_name, model.producer_version = "decomposable", __version__
    _check_bytes(model.ByteSize())
    return model


def _check_bytes(count: int) -> None:
    if count > MOST_BYTES:
        raise ExportError(
            f"export: the model has {count:,} bytes; allowed: at most {MOST_BYTES:,} in one ONNX file (a smaller size)"
        )


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph, and those inside its nodes: the branches of a condition, the body of a loop."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from _graphs(inner)


def _strip(model: onnx.ModelProto) -> None:
    """Take out all notes: the exporter puts stack traces, with the paths of source files, next to every node."""
    holders: list[Any] = [model, *model.functions]
    for function in model.functions:
        holders += [*function.node, *function.value_info]
    for graph in _graphs(model.graph):
        holders += [graph, *graph.node, *graph.input, *graph.output, *graph.initializer]
        del graph.value_info[:]  # shapes in between, which every reader infers
    for holder in holders:
        del holder.metadata_props[:]
        holder.ClearField("doc_string")


def _distinct_outputs(graph: onnx.GraphProto, names: Sequence[str]) -> dict[str, str]:
    """Give every output a value of its own, and say what it is to be called: a model may return its input, a weight,
    or one tensor twice.
    """
    from onnx import helper

    taken = {value.name for value in (*graph.input, *graph.initializer)}
    wanted = {}
    for i, (output, name) in enumerate(zip(graph.output, names, strict=True)):
        if output.name in taken:
            graph.node.append(helper.make_node("Identity", [output.name], [f"decomposable::output::{i}"]))
            output.name = f"decomposable::output::{i}"
        taken.add(output.name)
        wanted[output.name] = name
    return wanted


def _rename_values(graph: onnx.GraphProto, wanted: Mapping[str, str]) -> None:
    """Give inputs and outputs their names; a weight or a value in between that has such a name gets another."""
    taken = {
        name
        for inner in _graphs(graph)
        for name in (
            *(value for node in inner.node for value in (*node.input, *node.output)),
            *(value.name for value in (*inner.input, *inner.output, *inner.initializer)),
        )
    }
    names = dict(wanted)
    for name in wanted.values():
        other = name
        while other in taken or other in wanted.values():
            other += "_"
        if name in taken:
            names[name] = other
            taken.add(other)
    for inner in _graphs(graph):
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for value in (*inner.input, *inner.output, *inner.initializer):
            value.name = names.get(value.name, value.name)


def _rename_batch(graph: onnx.GraphProto) -> None:
    """Call the batch's size "batch", as in ``2*batch``; the exporter's name is a number of its own."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(rf"\b{re.escape(symbol)}\b", _BATCH, dim.dim_param)
