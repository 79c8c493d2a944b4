"""Between numpy's arrays and ONNX's tensors. Only tensors whose values lie in them as plain bytes are read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from decomposable.edge.source import Source, Stored
from decomposable.edge.wire import Place
from decomposable.fields import require

Array = NDArray[Any]

_TYPES: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT: np.dtype("<f4"),
    TensorProto.DOUBLE: np.dtype("<f8"),
    TensorProto.FLOAT16: np.dtype("<f2"),
    TensorProto.INT64: np.dtype("<i8"),
    TensorProto.INT32: np.dtype("<i4"),
    TensorProto.INT16: np.dtype("<i2"),
    TensorProto.INT8: np.dtype("i1"),
    TensorProto.UINT8: np.dtype("u1"),
    TensorProto.BOOL: np.dtype("?"),
}
_CODES = {dtype: code for code, dtype in _TYPES.items()}


def type_name(code: int) -> str | None:
    """Numpy's name of an ONNX type; None for one that is not dealt with.

    >>> type_name(TensorProto.FLOAT), type_name(TensorProto.BFLOAT16)
    ('float32', None)
    """
    return _TYPES[code].name if code in _TYPES else None


def stored_array(tensor: TensorProto, what: str, source: Source, place: Place | None) -> Array | Stored:
    """The values of a tensor, which cannot be written to; `what` is its name in messages.

    Where they lie in the file they stay; what was small enough to be read is there.
    """
    require(tensor.data_type in _TYPES, f"{what} has the type {tensor.data_type}")
    dtype, shape = _TYPES[tensor.data_type], tuple(tensor.dims)
    is_here = tensor.data_location == TensorProto.DEFAULT and not tensor.external_data
    require(is_here, f"{what} has its values in another file")
    count = len(tensor.raw_data) if place is None else place[1]
    is_whole = all(0 <= size <= 1 << 40 for size in shape) and math.prod(shape) * dtype.itemsize == count
    require(is_whole, f"{what} of shape {shape!s:.80} and type {dtype.name} has {count:,} bytes")
    if place is None:
        return np.frombuffer(tensor.raw_data, dtype).reshape(shape)
    return Stored(source, place[0], shape, dtype)


def in_memory(array: Array | Stored) -> Array:
    """All values of an array."""
    return array.all() if isinstance(array, Stored) else array


def tensor_of(name: str, array: Array) -> TensorProto:
    """The array as a tensor that holds its values."""
    tensor = _header(name, array)
    tensor.raw_data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return tensor


def header_of(name: str, array: Array | Stored) -> TensorProto:
    """A tensor that says where its values are not: the runtime is given them as memory."""
    tensor = _header(name, array)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="memory")
    return tensor


def _header(name: str, array: Array | Stored) -> TensorProto:
    return TensorProto(name=name, data_type=_CODES[array.dtype.newbyteorder("<")], dims=array.shape)
