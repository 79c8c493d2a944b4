"""Recurrent layers on their way to ONNX: one operator of our own for all steps, and what takes its place in the graph.

    torch.export ── decomposable::recurrence ── torch.onnx ── node Recurrence ── LSTM, GRU, RNN, or Scan

It keeps the steps together while PyTorch's exporters are at work, and in the graph of a network's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decomposable.core.unpacking.recurrent import RECORDER, CellWeights, State, chained
from decomposable.export.program import ExportError

if TYPE_CHECKING:
    import onnx

_DOMAIN, _NAME = "decomposable", "Recurrence"


@contextmanager
def kept_whole() -> Iterator[None]:
    """Inside, `torch.export` records a recurrent layer as one operator, whatever the number of steps."""
    token = RECORDER.set(_record)
    try:
        yield
    finally:
        RECORDER.reset(token)


def _record(mode: str, x: Tensor, start: State, weights: CellWeights, backwards: bool) -> tuple[Tensor, Tensor]:
    x = chained(x, weights.ih[:-1])
    tensors = [*start, weights.ih[-1], *(weights.biases or ()), *weights.hh, *weights.hr]
    counts = [0 if weights.biases is None else 2, len(weights.hh), len(weights.hr)]
    y, last = _operator()(x, tensors, mode, backwards, counts)
    return y, last


@cache
def _operator() -> Any:
    """Return the operator, which only knows the shapes of its outputs."""

    def shapes(
        x: Tensor, tensors: Sequence[Tensor], mode: str, backwards: bool, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        h, last = tensors[0], tensors[1 if mode == "LSTM" else 0]
        return x.new_empty(x.shape[0], x.shape[1], h.shape[-1]), last.new_empty(last.shape)

    schema = "(Tensor x, Tensor[] tensors, str mode, bool backwards, int[] counts) -> (Tensor, Tensor)"
    made = torch.library.custom_op(f"{_DOMAIN}::recurrence", shapes, mutates_args=(), schema=schema)
    made.register_fake(shapes)
    return torch.ops.decomposable.recurrence.default


def translations() -> dict[Any, Callable[..., Any]]:
    """Tell PyTorch's exporter to ONNX to make one node of the operator, with all tensors as its inputs."""
    import onnx
    from onnxscript import values

    schemas, kinds = onnx.defs.OpSchema, ["tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"]
    inputs = [schemas.FormalParameter("tensors", "T", param_option=schemas.FormalParameterOption.Variadic)]
    outputs = [schemas.FormalParameter(name, "T") for name in ("y", "last")]
    attributes = {"mode": "STRING", "backwards": "INT", "counts": "INTS"}
    schema = schemas(
        _NAME,
        _DOMAIN,
        1,
        inputs=inputs,
        outputs=outputs,
        type_constraints=[("T", kinds, "")],
        attributes=[schemas.Attribute(name, getattr(schemas.AttrType, kind)) for name, kind in attributes.items()],
    )
    node = values.Op(values.Opset(_DOMAIN, 1), _NAME, schema)

    def recurrence(x: Any, tensors: Any, mode: str, backwards: bool, counts: Any) -> Any:
        return node(x, *tensors, mode=mode, backwards=int(backwards), counts=list(counts))

    return {_operator(): recurrence}


def put_in_place(model: onnx.ModelProto) -> None:
    """Replace the nodes that stand for recurrent layers: by operators of ONNX where there is one, else by loops over
    the steps.
    """
    from onnx import numpy_helper

    from decomposable_edge.onnx_model import graphs_of, is_recurrence, tensor_of
    from decomposable_edge.recurrent import Recurrence, as_operator, can_be_operator, in_steps

    check_types(model)
    graph = model.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    holders = [inner for inner in graphs_of(graph) if any(map(is_recurrence, inner.node))]
    for holder in holders:
        nodes: list[onnx.NodeProto] = []
        for node in holder.node:
            if not is_recurrence(node):
                nodes.append(node)
                continue
            one = Recurrence.of(node)
            names = (one.ih, *one.hh, *one.biases)
            arrays = {name: numpy_helper.to_array(weights[name]) for name in names if name in weights}
            if can_be_operator(one, arrays):
                made, added = as_operator(one, arrays)
                nodes += made
                graph.initializer.extend(tensor_of(name, array) for name, array in added.items())
            else:
                nodes += in_steps(one, weights[one.ih].data_type)
        del holder.node[:]
        holder.node.extend(nodes)
    if not holders:
        return
    for i in reversed(range(len(model.opset_import))):
        if model.opset_import[i].domain == _DOMAIN:
            del model.opset_import[i]
    drop_unused(graph)


def check_types(model: onnx.ModelProto) -> None:
    """Refuse recurrent layers in half precision: ONNX Runtime has no kernels for them, and may end the process."""
    from onnx import TensorProto

    from decomposable_edge.onnx_model import graphs_of, is_recurrence
    from decomposable_edge.recurrent import Recurrence

    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in (node for graph in graphs_of(model.graph) for node in graph.node if is_recurrence(node)):
        if types[Recurrence.of(node).ih] not in (TensorProto.FLOAT, TensorProto.DOUBLE):
            raise ExportError(
                "export: ONNX Runtime's CPU does not run recurrent layers in half precision; allowed: float32 and "
                "float64"
            )


def drop_unused(graph: onnx.GraphProto) -> None:
    """Take out the weights that no node uses, not even inside."""
    from decomposable_edge.onnx_model import graphs_of

    taken = {name for inner in graphs_of(graph) for node in inner.node for name in node.input}
    taken |= {value.name for value in graph.output}
    for i in reversed(range(len(graph.initializer))):
        if graph.initializer[i].name not in taken:
            del graph.initializer[i]
