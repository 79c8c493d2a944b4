"""Computing the shapes that a graph computes: small whole numbers, of which ONNX's own inference follows only some."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

from decomposable.edge.arrays import Array

_FOLDABLE = {
    *("Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand", "Floor"),
    *("Gather", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg"),
    *("Not", "Or", "Range", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Sqrt"),
    *("Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where"),
}
_MOST_VALUES = 128


def known_shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    """The shape of a value, where all of it is known."""
    kind = value.type.tensor_type
    dims = kind.shape.dim
    is_known = kind.HasField("shape") and all(dim.HasField("dim_value") for dim in dims)
    return tuple(dim.dim_value for dim in dims) if is_known else None


def fold_shapes_(draft: onnx.ModelProto, inferred: onnx.GraphProto) -> bool:
    """Put numbers in place of the nodes that compute few of them from numbers or shapes; whether there were any.

    Nothing is computed whose size is not known beforehand, to be small.
    """
    graph = draft.graph
    infos = (*inferred.value_info, *inferred.output, *inferred.input)
    shapes = {value.name: shape for value in infos if (shape := known_shape(value)) is not None}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    values = {t.name: numpy_helper.to_array(t) for t in graph.initializer if t.data_location == TensorProto.DEFAULT}
    outputs, kept = {value.name for value in graph.output}, []
    for node in graph.node:
        value = None if outputs.intersection(node.output) else _value(node, shapes, values, draft.opset_import)
        if value is None:
            kept.append(node)
        else:
            values[node.output[0]] = value
            shapes[node.output[0]] = value.shape
            graph.initializer.append(numpy_helper.from_array(value, node.output[0]))
    has_changed = len(kept) < len(graph.node)
    if has_changed:
        copies = [NodeProto.FromString(node.SerializeToString()) for node in kept]
        del graph.node[:]
        graph.node.extend(copies)
    return has_changed


def _value(
    node: NodeProto, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Array], opsets: object
) -> Array | None:
    """What a node makes, where that can be told; its result is small, and so is all that it takes."""
    if len(node.output) != 1:
        return None
    if node.op_type in ("Shape", "Size") and len(node.input) == 1 and node.input[0] in shapes:
        shape = np.array(shapes[node.input[0]], np.int64)
        ends = {attribute.name: attribute.i for attribute in node.attribute}
        return shape[ends.get("start", 0) : ends.get("end")] if node.op_type == "Shape" else np.array(shape.prod())
    is_small = math.prod(shapes.get(node.output[0], (_MOST_VALUES + 1,))) <= _MOST_VALUES
    taken = {name: values[name] for name in node.input if name in values}
    is_told = len(taken) == len({name for name in node.input if name})
    if node.op_type not in _FOLDABLE or not (is_small and is_told):
        return None
    try:
        found = _evaluated(node, taken, opsets)
    except Exception:  # whatever is wrong with the node: then it is not told
        return None
    return np.asarray(found) if isinstance(found, np.ndarray | np.generic) else None


def _evaluated(node: NodeProto, taken: Mapping[str, Array], opsets: object) -> object:
    from onnx.reference import ReferenceEvaluator  # only where it is needed: it takes long to import

    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in taken.items()
    ]
    graph = helper.make_graph([node], "one", inputs, [onnx.ValueInfoProto(name=node.output[0])])
    model = helper.make_model(graph, opset_imports=opsets)
    return ReferenceEvaluator(model).run(None, dict(taken))[0]
