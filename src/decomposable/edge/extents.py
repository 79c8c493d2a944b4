"""How large the values between the nodes of a graph get, before memory is taken for them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx

from decomposable.edge.arrays import INLINE_BYTES, Array, header_of, tensor_of
from decomposable.storage.fields import Damaged, require

MOST_VALUES = 1 << 28
"""Of any one array, for one sample."""


def check_extents(model: onnx.ModelProto, tensors: Mapping[str, Array]) -> None:
    """Refuse a graph in which an array is absurdly large, as far as one can tell without running it."""
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
    try:
        inferred = onnx.shape_inference.infer_shapes(draft, data_prop=True)
    except Exception as error:  # its own kinds
        raise Damaged(f"its graph contradicts itself: {' '.join(str(error).split())[:150]}") from error
    for value in (*inferred.graph.value_info, *inferred.graph.output):
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim if dim.HasField("dim_value")]
        is_sane = all(size >= 0 for size in dims) and math.prod(dims) <= MOST_VALUES
        require(is_sane, f"'{value.name:.60}' has the shape {dims!s:.80}")
