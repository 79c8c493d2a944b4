"""The outer shape of a bundle: an ONNX file that carries more than the graph, and ends with its own checksum.

    ONNX model ─┬─ graph: the network with all bases of every factor, which any ONNX runtime can run
                ├─ metadata "decomposable": a description in JSON
                ├─ function decomposable::plan: arrays, as constants; nothing calls it
                └─ metadata "decomposable.sha256", the file's last bytes: 64 digits for all that comes before them

Runtimes load a function that nobody calls without a word; they warn of initializers that no node uses. While a file is
read, nothing in it is executed, no other file is opened for it, and no memory is taken for what it merely claims to
hold. Its graph is executed when it is run: a bundle is to be trusted like any model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from decomposable_edge.fields import Damaged, parse_json, require
from decomposable_edge.source import Array, Source, Stored
from decomposable_edge.wire import FUNCTIONS, GRAPH, Key, Place, outline

FORMAT = 1
"""The version of the format that is written; a file of a larger one is refused."""

MOST_BYTES = 2**31 - 1  # of one protobuf message
DOMAIN = "decomposable"
_ENTRY, _PLAN, _CHECKSUM = "decomposable", "plan", "decomposable.sha256"
_DIGITS = 64

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


def seal(model: onnx.ModelProto, description: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """The file: the model with the description, the arrays and the checksum."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    text = json.dumps({"format": FORMAT, **description}, allow_nan=False, separators=(",", ":"))
    whole.metadata_props.add(key=_ENTRY, value=text)
    constants = [helper.make_node("Constant", [], [name], value=tensor_of(name, a)) for name, a in arrays.items()]
    opsets = [opset for opset in whole.opset_import if opset.domain in ("", "ai.onnx")]
    whole.functions.append(helper.make_function(DOMAIN, _PLAN, [], list(arrays), constants, opsets))
    whole.opset_import.append(helper.make_opsetid(DOMAIN, FORMAT))
    content = whole.SerializeToString(deterministic=True) + _before_digits()
    return content + hashlib.sha256(content).hexdigest().encode()


def _before_digits() -> bytes:
    """How the last entry of the metadata begins. Protobuf lets fields be written one behind the other."""
    entry = onnx.ModelProto()
    entry.metadata_props.add(key=_CHECKSUM, value="0" * _DIGITS)
    return entry.SerializeToString()[:-_DIGITS]


@dataclass(frozen=True, kw_only=True, eq=False)
class Unsealed:
    """A file whose checksum is right. What is large of its weights and arrays is read when it is needed."""

    model: onnx.ModelProto  # without its weights, and without what makes it a bundle
    description: dict[str, Any]
    weights: dict[str, Array | Stored]  # of the graph
    arrays: dict[str, Array | Stored]  # of the function


def unseal(path: str | os.PathLike[str]) -> Unsealed:
    """Open a file and take it apart; raises `Damaged` where its checksum is wrong, or it is none of ours."""
    source = Source(path, most=MOST_BYTES, without=_DIGITS)
    begin, size = _before_digits(), source.size
    is_sealed = size > len(begin) + _DIGITS and source.read(size - _DIGITS - len(begin), len(begin)) == begin
    require(is_sealed, "not a whole any-size bundle: it does not end with a checksum")
    stated = source.read(size - _DIGITS, _DIGITS)
    require(source.digest.encode() == stated, "its checksum is wrong: it was damaged or changed")
    light, places = outline(source)
    try:
        model = onnx.ModelProto.FromString(light)
    except Exception as error:  # protobuf's own, and those of text that is none
        raise Damaged("not an ONNX model") from error
    del light
    _check_text(model)
    description = _description(model)
    arrays = _take_arrays(model, source, places)
    weights = _take_weights(model.graph, source, places)
    _check_plain(model)
    return Unsealed(model=model, description=description, weights=weights, arrays=arrays)


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


def _description(model: onnx.ModelProto) -> dict[str, Any]:
    texts = [entry.value for entry in model.metadata_props if entry.key == _ENTRY]
    require(len(texts) == 1, "its metadata have no 'decomposable', or several")
    description = parse_json(texts[0])
    version: Any = description.get("format") if isinstance(description, dict) else None
    require(type(version) is int and version >= 1, "its description has no format version")
    newer = f"its format is version {version}, this package reads up to {FORMAT}; install a newer one"
    require(version <= FORMAT, newer)
    del model.metadata_props[:]
    return description


def _take_weights(graph: onnx.GraphProto, source: Source, places: Mapping[Key, Place]) -> dict[str, Array | Stored]:
    """The weights of the graph, which is left without them."""
    weights: dict[str, Array | Stored] = {}
    for i, tensor in enumerate(graph.initializer):
        require(tensor.name not in weights, f"tensor '{tensor.name:.60}' is there twice")
        weights[tensor.name] = stored_array(tensor, f"tensor '{tensor.name:.60}'", source, places.get((GRAPH, i)))
    del graph.initializer[:]
    del graph.value_info[:]
    return weights


def _take_arrays(model: onnx.ModelProto, source: Source, places: Mapping[Key, Place]) -> dict[str, Array | Stored]:
    """The constants of the one function, which is taken out."""
    is_one = len(model.functions) == 1 and (model.functions[0].domain, model.functions[0].name) == (DOMAIN, _PLAN)
    require(is_one, "it has not exactly the one function decomposable::plan")
    arrays: dict[str, Array | Stored] = {}
    for i, node in enumerate(model.functions[0].node):
        is_constant = (node.op_type, node.domain, len(node.output), len(node.attribute)) == ("Constant", "", 1, 1)
        require(is_constant and node.attribute[0].HasField("t"), "its function decomposable::plan has other nodes")
        name = node.output[0]
        require(name not in arrays, f"array '{name:.60}' is there twice")
        place = places.get((FUNCTIONS, 0, i, 0))
        arrays[name] = stored_array(node.attribute[0].t, f"array '{name:.60}'", source, place)
    del model.functions[:]
    for i in reversed(range(len(model.opset_import))):
        if model.opset_import[i].domain == DOMAIN:
            del model.opset_import[i]
    return arrays


def _check_plain(model: onnx.ModelProto) -> None:
    """Refuse what could run code or read files: operators of others, weights that lie elsewhere."""
    require(not model.training_info, "it has training graphs")
    versions = [opset.version for opset in model.opset_import]
    domains = [opset.domain for opset in model.opset_import]
    require(domains in ([""], ["ai.onnx"]) and 13 <= versions[0] <= 1000, "its operator sets are not plain ONNX")
    for graph in graphs_of(model.graph):
        require(not graph.sparse_initializer, "it has sparse weights")
        for node in graph.node:
            is_plain = node.domain in ("", "ai.onnx")
            require(is_plain, f"node '{node.name:.60}' is {node.domain:.40}::{node.op_type:.40}, not plain ONNX")
            is_loop = node.op_type == "Loop" or (node.op_type == "Scan" and graph is not model.graph)
            require(not is_loop, f"node '{node.name:.60}' is a loop")  # it may have no end, nor one inside of another
            for attribute in node.attribute:
                require(not attribute.ref_attr_name, f"node '{node.name:.60}' refers to a function's attribute")
                is_sparse = attribute.HasField("sparse_tensor") or attribute.sparse_tensors
                require(not is_sparse, f"node '{node.name:.60}' has sparse values")
                for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
                    check_here(tensor, f"node '{node.name:.60}'")
        for tensor in graph.initializer:  # of inner graphs
            check_here(tensor, f"tensor '{tensor.name:.60}'")


def check_here(tensor: TensorProto, what: str) -> None:
    """Refuse a tensor whose values lie in another file, and one that is not what it claims."""
    _require_here(tensor, what)
    claimed = math.prod(tensor.dims) if all(dim >= 0 for dim in tensor.dims) else -1
    require(0 <= claimed <= max(1, 8 * tensor.ByteSize()), f"{what} has the shape {list(tensor.dims)!s:.80}")


def _require_here(tensor: TensorProto, what: str) -> None:
    is_here = tensor.data_location == TensorProto.DEFAULT and not tensor.external_data
    require(is_here, f"{what} has its values in another file")  # which could be any file


def graphs_of(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """The graph, and those inside its nodes: the branches of a condition, the body of a loop."""
    waiting = [graph]
    while waiting:
        current = waiting.pop()
        yield current
        waiting += [inner for node in current.node for inner in inner_graphs(node)]


def inner_graphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs that are a node's own."""
    return [graph for a in node.attribute for graph in (*([a.g] if a.HasField("g") else []), *a.graphs)]


def type_name(code: int) -> str | None:
    """Numpy's name of an ONNX type; None for one that is not dealt with.

    >>> type_name(TensorProto.FLOAT), type_name(TensorProto.BFLOAT16)
    ('float32', None)
    """
    return _TYPES[code].name if code in _TYPES else None


def stored_array(tensor: TensorProto, what: str, source: Source, place: Place | None) -> Array | Stored:
    """The values of a tensor, which cannot be written to; `what` is its name in messages.

    Only values that lie there as plain bytes are read. Large ones stay in the file; what was small enough is there.
    """
    require(tensor.data_type in _TYPES, f"{what} has the type {tensor.data_type}")
    dtype, shape = _TYPES[tensor.data_type], tuple(tensor.dims)
    _require_here(tensor, what)
    count = len(tensor.raw_data) if place is None else place[1]
    is_whole = all(0 <= size <= 1 << 40 for size in shape) and math.prod(shape) * dtype.itemsize == count
    require(is_whole, f"{what} of shape {shape!s:.80} and type {dtype.name} has {count:,} bytes")
    if place is None:
        return np.frombuffer(tensor.raw_data, dtype).reshape(shape)
    return Stored(source, place[0], shape, dtype)


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
