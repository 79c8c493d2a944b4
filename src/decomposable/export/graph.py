"""A module as an ONNX graph: dynamic batch, plain names, and nothing of the machine that it was made on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decomposable import __version__
from decomposable.export.interface import BATCH, PREFIX, Feeds, Interface
from decomposable.export.lowering import spare_decompositions
from decomposable.export.program import ExportError, output_names, ready, symbols, to_program
from decomposable.export.quiet import quiet, refusing
from decomposable.export.recurrent import kept_whole, put_in_place, translations
from decomposable.progress import quiet as ignored
from decomposable_edge.errors import MissingExtraError
from decomposable_edge.machine import collecting_later

if TYPE_CHECKING:
    import onnx

MOST_BYTES = 2**31 - 1  # of one protobuf message
TRACING, TRANSLATING = "tracing the network", "translating it to ONNX"  # what `begin` is told
_UNIQUE_INPUT = "decomposable::input"  # a parameter of the model may be called "input"


def require_onnx() -> None:
    """Raise where a package of the extra `onnx` is missing, before any work is done."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        if find_spec(package) is None:  # not imported: that of ONNX Runtime has a place of its own
            raise MissingExtraError.of(package, "onnx")


@collecting_later()  # PyTorch's exporters are large, and make a great many small objects
def to_onnx(
    module: nn.Module,
    interface: Interface,
    *,
    optimize: bool,
    rows: Feeds | None = None,
    begin: Callable[[str], None] = ignored,
) -> tuple[onnx.ModelProto, Interface]:
    """Return the graph of a module in eval mode, and what it takes: without the inputs that the module ignores.

    The initializers are called as in the state dict. With `optimize`, constants are computed and batch normalisation is
    folded into the layer before it, where it can be. Without, every layer stays as the module has it, and a recurrent
    one is a node of our own. `rows` are samples to trace it with; by default made-up ones. `begin` is told of each
    stage of the work.
    """
    require_onnx()
    begin(TRACING)
    plain = ready(module)
    tensors = {id(t): t for t in (*plain.parameters(), *plain.buffers())}
    _check_bytes(sum(t.numel() * t.element_size() for t in tensors.values()))
    outputs = output_names(plain, interface, interface.rows(rows, interface.batch or 1))
    with kept_whole():
        program, interface = to_program(plain, interface, rows)
    begin(TRANSLATING)
    axes = symbols(program, interface)
    spare_decompositions(program)
    unique = {f"{_UNIQUE_INPUT}::{i}": name for i, name in enumerate(interface.names)}
    with refusing(ExportError, "export: the model has no ONNX form"), quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            optimize=optimize,
            verbose=False,
            input_names=list(unique),
            custom_translation_table=translations(),
        )
        assert made is not None
        model: onnx.ModelProto = made.model_proto
    if [value.name for value in model.graph.input] != list(unique) or len(model.graph.output) != len(outputs):
        raise ExportError("export: the ONNX graph has other inputs and outputs than the model")
    if optimize:
        put_in_place(model)
    _strip(model)
    name_values(model.graph, unique, outputs)
    _rename_values(model.graph, _without_prefix(plain, model.graph))
    _rename_axes(model.graph, interface, axes)
    model.producer_name, model.producer_version = "decomposable", __version__
    _check_bytes(model.ByteSize())
    return model, interface


def _without_prefix(module: nn.Module, graph: onnx.GraphProto) -> dict[str, str]:
    """Return the module's own names of weights, where the exporter was given it inside another one."""
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    ports = {value.name for value in (*graph.input, *graph.output)}
    names = {tensor.name: tensor.name.removeprefix(PREFIX) for tensor in graph.initializer}
    is_wrapped = any(name not in own and short in own for name, short in names.items())
    return {name: short for name, short in names.items() if is_wrapped and name != short and short not in ports}


def _check_bytes(count: int) -> None:
    if count > MOST_BYTES:
        raise ExportError(
            f"export: the model has {count:,} bytes; allowed: at most {MOST_BYTES:,} in one ONNX file (a smaller size)"
        )


def _strip(model: onnx.ModelProto) -> None:
    """Take out all notes: the exporter puts stack traces, with the paths of source files, next to every node."""
    from decomposable_edge.onnx_model import graphs_of

    holders: list[Any] = [model, *model.functions]
    for function in model.functions:
        holders += [*function.node, *function.value_info]
    for graph in graphs_of(model.graph):
        holders += [graph, *graph.node, *graph.input, *graph.output, *graph.initializer]
        del graph.value_info[:]  # shapes in between, which every reader infers
    for holder in holders:
        del holder.metadata_props[:]
        holder.ClearField("doc_string")


def name_values(graph: onnx.GraphProto, inputs: Mapping[str, str], outputs: Sequence[str]) -> None:
    """Name inputs and outputs. Each output is a value of its own: a model may return an input, or one tensor twice."""
    from onnx import helper

    taken = {value.name for value in (*graph.input, *graph.initializer)}
    wanted = dict(inputs)
    for i, (output, name) in enumerate(zip(graph.output, outputs, strict=True)):
        if output.name in taken:
            graph.node.append(helper.make_node("Identity", [output.name], [f"decomposable::output::{i}"]))
            output.name = f"decomposable::output::{i}"
        taken.add(output.name)
        wanted[output.name] = name
    _rename_values(graph, wanted)


def _rename_values(graph: onnx.GraphProto, wanted: Mapping[str, str]) -> None:
    """Give inputs and outputs their names; a weight or a value in between that has such a name gets another."""
    from decomposable_edge.onnx_model import graphs_of

    graphs = list(graphs_of(graph))
    taken = {name for inner in graphs for node in inner.node for name in (*node.input, *node.output)}
    taken |= {value.name for inner in graphs for value in (*inner.input, *inner.output, *inner.initializer)}
    names = dict(wanted)
    for name in sorted((taken & set(wanted.values())) - wanted.keys()):
        other = name
        while other in taken or other in wanted.values():
            other += "_"
        names[name] = other
        taken.add(other)
    for inner in graphs:
        for node in inner.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
        for value in (*inner.input, *inner.output, *inner.initializer):
            value.name = names.get(value.name, value.name)


def _rename_axes(graph: onnx.GraphProto, interface: Interface, symbols: Mapping[str, Sequence[str]]) -> None:
    """Call the axes that vary by their names, as in ``2*batch``; the exporter's are numbers of its own."""
    names = {symbol: axis for axis, found in symbols.items() for symbol in found if symbol.isidentifier()}
    for value in (*graph.input, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = re.sub(r"\w+", lambda match: names.get(match[0], match[0]), dim.dim_param)
    ports = {value.name: value for value in graph.input}
    for axis, places in interface.places().items():
        for name, at in places if axis != BATCH or interface.batch is None else ():
            ports[name].type.tensor_type.shape.dim[at].dim_param = axis
