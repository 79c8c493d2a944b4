"""How large the values between the nodes of a graph get, before memory is taken for them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import onnx

from decomposable.edge.arrays import INLINE_BYTES, Array, header_of, tensor_of
from decomposable.edge.container import graphs_of
from decomposable.edge.shapes import fold_shapes_, known_shape
from decomposable.storage.fields import Damaged, require

MOST_VALUES = 1 << 28
"""Of any one array, for one sample."""

GROWING = {
    *("AffineGrid", "BlackmanWindow", "CenterCropPad", "Col2Im", "ConstantOfShape", "ConvTranspose", "DFT", "Expand"),
    *("Gather", "GatherND", "GridSample", "HammingWindow", "HannWindow", "MaxUnpool", "MelWeightMatrix", "OneHot"),
    *("Pad", "RandomNormal", "RandomUniform", "Range", "Resize", "STFT", "Tile", "Upsample"),
}
"""Operators that make much of little: numbers that they are given, or attributes, say how much."""

_MOST_PASSES = 50


def check_extents(model: onnx.ModelProto, tensors: Mapping[str, Array]) -> None:
    """Refuse a graph in which an array is absurdly large, or may be: all is found out without running it.

    Where an operator's result is as large as some computed shape says, the shape is computed, for one sample.
    """
    draft = onnx.ModelProto()
    draft.CopyFrom(model)
    for name, array in tensors.items():
        is_small = array.nbytes <= INLINE_BYTES  # the values of shapes count, of weights only their shapes do
        draft.graph.initializer.append(tensor_of(name, array) if is_small else header_of(name, array))
    for value in draft.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = 1
    for value in draft.graph.output:
        value.type.tensor_type.ClearField("shape")
    for _ in range(_MOST_PASSES):  # what one growing operator's shape tells may be another one's
        inferred = _inferred(draft)
        unknown = next(_unknown(inferred.graph), None)
        if unknown is None:
            return
        what = f"node '{unknown.name:.60}', {unknown.op_type:.40},"
        require(fold_shapes_(draft, inferred.graph), f"how large {what} gets is not known before it runs")
    raise Damaged(f"its shapes depend on each other more than {_MOST_PASSES} times")


def _inferred(draft: onnx.ModelProto) -> onnx.ModelProto:
    """The model with the shapes of all values that can be told, none of them absurd."""
    try:
        inferred = onnx.shape_inference.infer_shapes(draft, data_prop=True)
    except Exception as error:  # its own kinds
        raise Damaged(f"its graph contradicts itself: {' '.join(str(error).split())[:150]}") from error
    for graph in graphs_of(inferred.graph):
        for value in (*graph.value_info, *graph.output):
            kind = value.type.tensor_type
            require(kind.elem_type != onnx.TensorProto.STRING, f"'{value.name:.60}' is text, which has any length")
            dims = [dim.dim_value for dim in kind.shape.dim if dim.HasField("dim_value")]
            is_sane = all(size >= 0 for size in dims) and math.prod(dims) <= MOST_VALUES
            require(is_sane, f"'{value.name:.60}' has the shape {dims!s:.80}")
    return inferred


def _unknown(top: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The growing operators whose results may be of any size."""
    for graph in graphs_of(top):
        known = {value.name for value in (*graph.value_info, *graph.output) if known_shape(value) is not None}
        for node in graph.node:
            if node.op_type in GROWING and not known.issuperset(filter(None, node.output)):
                yield node
