"""The graph in a file as an ONNX model: taken apart, checked, and the tensors of a model that is made of it.

While it is read, nothing in it is executed, no other file is opened for it, and no memory is taken for what it merely
claims to hold. It is executed when it is run: a file is to be trusted like any model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from decomposable_edge.fields import Damaged, require
from decomposable_edge.file.container import Array

RECURRENCE = "decomposable", "Recurrence"
"""Domain and name of the one operator of our own: a recurrent layer, which a session replaces before it runs."""

_NAMES = ("float32", "float64", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
_TYPES = {helper.np_dtype_to_tensor_dtype(np.dtype(name)): np.dtype(name).newbyteorder("<") for name in _NAMES}


def parse_model(content: bytes) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return the model of these bytes, and its constants, which are taken out of it; raise `Damaged` for any other."""
    try:
        model = onnx.ModelProto.FromString(content)
    except Exception as error:  # protobuf's own, and those of text that is none
        raise Damaged("its graph is not an ONNX model") from error
    _check_text(model)
    _check_plain(model)
    constants: dict[str, Array] = {}
    for tensor in model.graph.initializer:
        require(tensor.name not in constants, f"tensor '{tensor.name:.60}' is there twice")
        constants[tensor.name] = _values(tensor, f"tensor '{tensor.name:.60}'")
    del model.graph.initializer[:]
    del model.graph.value_info[:]
    del model.metadata_props[:]
    return model, constants


def _values(tensor: TensorProto, what: str) -> Array:
    """Return the values of a tensor, which cannot be written to. Only such as lie there as plain bytes are read."""
    require(tensor.data_type in _TYPES, f"{what} has the type {tensor.data_type}")
    dtype, shape, count = _TYPES[tensor.data_type], tuple(tensor.dims), len(tensor.raw_data)
    is_whole = all(0 <= size <= 1 << 40 for size in shape) and math.prod(shape) * dtype.itemsize == count
    require(is_whole, f"{what} of shape {shape!s:.80} and type {dtype.name} has {count:,} bytes")
    return np.frombuffer(tensor.raw_data, dtype).reshape(shape)


def _check_text(message: Any) -> None:
    """Refuse names that are not text: protobuf gives them as bytes. The values of tensors are not looked at."""
    if isinstance(message, TensorProto):
        require(isinstance(message.name, str), "a tensor's name is not text")
        return
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for part in value if isinstance(value, Iterable) else (value,):
                _check_text(part)
        elif field.type == field.TYPE_STRING:
            texts = [value] if isinstance(value, str | bytes) else value
            require(all(isinstance(text, str) for text in texts), f"a {field.name} in it is not text")


def _check_plain(model: onnx.ModelProto) -> None:
    """Refuse what could run code or read files: operators of others, weights that lie elsewhere."""
    require(not model.training_info and not model.functions, "it has training graphs, or functions")
    versions = {opset.domain: opset.version for opset in model.opset_import if opset.domain != RECURRENCE[0]}
    is_plain = len(versions) == 1 and all(d in ("", "ai.onnx") and 13 <= v <= 1000 for d, v in versions.items())
    require(is_plain, "its operator sets are not plain ONNX")
    for graph in graphs_of(model.graph):
        require(not graph.sparse_initializer, "it has sparse weights")
        for node in graph.node:
            what = f"node '{node.name:.60}'"
            is_plain = node.domain in ("", "ai.onnx") or (is_recurrence(node) and graph is model.graph)
            require(is_plain, f"{what} is {node.domain:.40}::{node.op_type:.40}, not plain ONNX")
            require(node.op_type not in ("Loop", "Scan"), f"{what} is a loop")  # it may have no end
            for attribute in node.attribute:
                require(not attribute.ref_attr_name, f"{what} refers to a function's attribute")
                is_sparse = attribute.HasField("sparse_tensor") or attribute.sparse_tensors
                require(not is_sparse, f"{what} has sparse values")
                for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                    _check_here(tensor, what)
        for tensor in graph.initializer:
            _check_here(tensor, f"tensor '{tensor.name:.60}'")


def _check_here(tensor: TensorProto, what: str) -> None:
    """Refuse a tensor whose values lie in another file, and one that is not what it claims."""
    is_here = tensor.data_location == TensorProto.DEFAULT and not tensor.external_data
    require(is_here, f"{what} has its values in another file")  # which could be any file
    claimed = math.prod(tensor.dims) if all(dim >= 0 for dim in tensor.dims) else -1
    require(0 <= claimed <= max(1, 8 * tensor.ByteSize()), f"{what} has the shape {list(tensor.dims)!s:.80}")


def is_recurrence(node: onnx.NodeProto) -> bool:
    """Return whether a node stands for a recurrent layer."""
    return (node.domain, node.op_type) == RECURRENCE


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """Give the graph, and those inside its nodes: the branches of a condition, the body of a loop."""
    waiting = [graph]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [inner for node in current.node for inner in inner_graphs(node)]


def inner_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the graphs that are a node's own."""
    return [graph for a in node.attribute for graph in (*([a.g] if a.HasField("g") else []), *a.graphs)]


def type_name(code: int) -> str | None:
    """Return numpy's name of an ONNX type; None for one that is not dealt with.

    >>> type_name(TensorProto.FLOAT), type_name(TensorProto.BFLOAT16)
    ('float32', None)
    """
    return _TYPES[code].name if code in _TYPES else None


def type_code(array: Array) -> int:
    """Return ONNX's number for the type of an array."""
    return helper.np_dtype_to_tensor_dtype(array.dtype.newbyteorder("="))


def tensor_of(name: str, array: Array) -> TensorProto:
    """Return the array as a tensor that holds its values."""
    return numpy_helper.from_array(array.astype(array.dtype.newbyteorder("="), copy=False), name)


def header_of(name: str, array: Array) -> TensorProto:
    """Return a tensor that says where its values are not: the runtime is given them as memory."""
    tensor = TensorProto(name=name, data_type=type_code(array), dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="memory")
    return tensor
