"""Recurrent layers on their way to ONNX: one operator of our own for all steps, and what takes its place in the graph.

    torch.export ── decomposable::recurrence ── torch.onnx ── node Recurrence ── LSTM, GRU, RNN, or Scan

No file has that operator: it only keeps the steps together while PyTorch's exporters are at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decomposable.core.unpacking.recurrent import RECORDER, CellWeights, State, chained
from decomposable.export.program import ExportError

if TYPE_CHECKING:
    import onnx

    from decomposable_edge.recurrent import Recurrence

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


def is_kept(node: onnx.NodeProto) -> bool:
    """Return whether a node stands for a recurrent layer."""
    return bool((node.domain, node.op_type) == (_DOMAIN, _NAME))


def put_in_place(model: onnx.ModelProto, *, as_operators: bool) -> None:
    """Replace nodes that stand for recurrent layers: by operators of ONNX where that can be, else by loops."""
    from decomposable_edge.onnx_model import graphs_of

    graph = model.graph
    holders = [inner for inner in graphs_of(graph) if any(map(is_kept, inner.node))]
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for holder in holders:
        nodes: list[onnx.NodeProto] = []
        for node in holder.node:
            made, tensors = _made_of(_read(node), weights, as_operators) if is_kept(node) else ([node], [])
            nodes += made
            graph.initializer.extend(tensors)
        del holder.node[:]
        holder.node.extend(nodes)
    if not holders:
        return
    for i in reversed(range(len(model.opset_import))):
        if model.opset_import[i].domain == _DOMAIN:
            del model.opset_import[i]
    drop_unused(graph)


def _made_of(
    one: Recurrence, weights: Mapping[str, onnx.TensorProto], as_operators: bool
) -> tuple[list[onnx.NodeProto], list[onnx.TensorProto]]:
    """Return the nodes of one recurrence, and the weights that come with them."""
    from onnx import TensorProto, numpy_helper

    from decomposable_edge.onnx_model import tensor_of
    from decomposable_edge.recurrent import as_operator, can_be_operator, in_steps

    kind, names = weights[one.ih].data_type, (one.ih, *one.hh, *one.biases)
    if kind not in (TensorProto.FLOAT, TensorProto.DOUBLE):  # it has no kernels for them, and may end the process
        raise ExportError(
            "export: ONNX Runtime's CPU does not run recurrent layers in half precision; allowed: float32 and float64"
        )
    arrays = {name: numpy_helper.to_array(weights[name]) for name in names if name in weights}
    if as_operators and can_be_operator(one, arrays):
        made, added = as_operator(one, arrays)
        return made, [tensor_of(name, array) for name, array in added.items()]
    return in_steps(one, kind), []


def _read(node: onnx.NodeProto) -> Recurrence:
    """Return what a node says, by the names of its inputs."""
    from onnx import helper

    from decomposable_edge.recurrent import Recurrence

    told: Mapping[str, Any] = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    mode, (biases, hh, hr) = told["mode"].decode(), told["counts"]
    rest = iter(node.input)

    def some(count: int) -> tuple[str, ...]:
        return tuple(next(rest) for _ in range(count))

    (x,), states, (ih,) = some(1), some(2 if mode == "LSTM" else 1), some(1)
    y, last = node.output
    return Recurrence(
        mode=mode,
        backwards=bool(told["backwards"]),
        x=x,
        states=states,
        ih=ih,
        biases=some(biases),
        hh=some(hh),
        hr=some(hr),
        y=y,
        last=last,
    )


def drop_unused(graph: onnx.GraphProto) -> None:
    """Take out the weights that no node uses, not even inside."""
    from decomposable_edge.onnx_model import graphs_of

    taken = {name for inner in graphs_of(graph) for node in inner.node for name in node.input}
    taken |= {value.name for value in graph.output}
    for i in reversed(range(len(graph.initializer))):
        if graph.initializer[i].name not in taken:
            del graph.initializer[i]
