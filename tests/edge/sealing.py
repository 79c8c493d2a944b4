"""Files for devices that are made by hand, and taken apart: a graph, a description and arrays, with right checksums."""

import tempfile
from pathlib import Path

import numpy as np
import onnx

from decomposable_edge.device_graph import GRAPH
from decomposable_edge.file.container import InNumpy, opened, write


def write_arrays(path, description, arrays):
    """Write a file of these arrays."""
    plain = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    write(path, description, {name: (str(a.dtype), a.shape, InNumpy().bytes_of(a)) for name, a in plain.items()})


def seal(model, description, arrays):
    """The bytes of a file; `model` is an ONNX model without weights, or its bytes."""
    content = model if isinstance(model, bytes) else model.SerializeToString()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write_arrays(path, description, {**arrays, GRAPH: np.frombuffer(content, np.uint8)})
        return path.read_bytes()


def unseal(path):
    """The model, the description and the arrays of a file."""
    with opened(path, InNumpy()) as container:
        arrays = {name: np.array(array) for name, array in container.read_all().items()}
        model = onnx.ModelProto.FromString(arrays.pop(GRAPH).tobytes())
        return model, container.description, arrays


def tiny_model(width=6, seed=0):
    """Two linear layers with a ReLU between them, made without PyTorch, as (model, description, arrays)."""
    from onnx import TensorProto, helper

    random = np.random.default_rng(seed)
    nodes, arrays, value = [], {}, "x"
    for name, out, then in (("a", "h", "Relu"), ("b", "y", None)):
        first, second = (random.standard_normal((width, width)).astype(np.float32) for _ in range(2))
        arrays |= {f"first/{name}": first, f"second/{name}": second, f"state/{name}.weight": second.T @ first}
        for part, of in (("first", value), ("second", f"{name}/between")):
            result = f"{name}/between" if part == "first" else (f"{out}/raw" if then else out)
            nodes.append(
                helper.make_node("Gemm", [of, f"{part}/{name}"], [result], name=f"{part}/{name}", alpha=1.0, transB=1)
            )
        if then:
            nodes.append(helper.make_node(then, [f"{out}/raw"], [out], name=f"{name}/{then}"))
        value = out
        arrays[f"scores/{name}"] = np.sort(random.random(width))[::-1]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", width])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    cost = {"form": "channel", "shape": [width, width], "dense_macs": width**2, "macs_per_rank": 2 * width}
    description = {
        "kind": "network",
        "layers": [{"name": "a", **cost}, {"name": "b", **cost}],
        "state": {"a.weight": {"trainable": True}, "b.weight": {"trainable": True}},
        "fixed_macs": 0,
        "fixed_params": 0,
        "left_alone": [],
        "layer_before_norm": {},
        "statistics": None,
        "tuned": None,
        "onnx": {"lengths": {}, "values": {}},
        "info": {},
    }
    arrays |= {"limits/lower": np.ones(2, np.int64), "limits/upper": np.full(2, width, np.int64)}
    return model, description, arrays
