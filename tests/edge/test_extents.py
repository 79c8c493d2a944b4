"""Graphs that would take memory for a claim, and those that compute shapes and are fine."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from decomposable.edge.extents import check_extents
from decomposable.storage.fields import Damaged


def model_of(*nodes, output="y"):
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 6])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def node(kind, inputs, output, **attributes):
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def branch():
    shape = helper.make_tensor("s", TensorProto.INT64, [2], [1 << 15, 1 << 15])
    nodes = [
        helper.make_node("Constant", [], ["shape"], value=shape),
        node("ConstantOfShape", "shape", "big"),
        node("ReduceSum", "big", "r", keepdims=0),
    ]
    return helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, [])])


TENSORS = {
    "factors": np.array([1 << 12, 1 << 12, 1 << 6]),
    "one": np.ones(1, np.float32),
    "true": np.array(True),
    "six": np.array([6]),
    "zero": np.array([0]),
    "minus": np.array([-4]),
}


@pytest.mark.parametrize(
    "nodes",
    [
        [node("ReduceProd", "factors", "n", keepdims=1), node("ConstantOfShape", "n", "big")],
        [node("ReduceProd", "factors", "n", keepdims=1), node("Expand", "one n", "big")],
        [node("If", "true", "big", then_branch=branch(), else_branch=branch())],
        [node("NonZero", "x", "n"), node("Shape", "n", "s"), node("ConstantOfShape", "s", "big")],
        [node("Cast", "x", "n", to=7), node("Reshape", "n six", "s"), node("Expand", "one s", "big")],
        [node("Cast", "x", "text", to=8), node("Shape", "text", "big")],
    ],
)
def test_what_may_be_of_any_size_is_refused(nodes):
    with pytest.raises(Damaged) as caught:
        check_extents(model_of(*nodes, node("ReduceSum", "big", "y", keepdims=0)), TENSORS)
    assert "\n" not in str(caught.value)


def test_shapes_that_are_computed_are_computed():
    nodes = [
        node("Shape", "x", "batch", start=0, end=1),
        node("Abs", "minus", "four"),
        node("Concat", "batch four six", "shape", axis=0),
        node("Expand", "one shape", "wide"),
        node("Shape", "wide", "again"),
        node("Abs", "again", "positive"),
        node("ConstantOfShape", "positive", "more"),
        node("ReduceSum", "more", "y", keepdims=0),
    ]
    check_extents(model_of(*nodes), TENSORS)


def test_branches_of_a_sane_size_are_fine():
    inner = helper.make_graph(
        [node("Expand", "one six", "r")], "b", [], [helper.make_tensor_value_info("r", TensorProto.FLOAT, [6])]
    )
    check_extents(model_of(node("If", "true", "y", then_branch=inner, else_branch=inner)), TENSORS)
