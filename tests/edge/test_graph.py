"""Finding layers and foldable normalisation in graphs built by hand."""

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from decomposable_edge.fields import Damaged
from decomposable_edge.graph import Use, Wiring, check_geometry, find_foldable, find_uses, merged_attributes


def wired(*nodes, outputs=("y",)):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    return Wiring(helper.make_graph(list(nodes), "g", [], values))


def conv(x, w, y, **attributes):
    return helper.make_node("Conv", [x, *([w] if isinstance(w, str) else w)], [y], **attributes)


def test_a_pair_is_found_across_padding():
    wiring = wired(
        helper.make_node("Pad", ["x", "p"], ["a"]),
        conv("a", "first/c", "b"),
        helper.make_node("Pad", ["b", "p"], ["d"]),
        conv("d", ["second/c", "bias"], "y"),
    )
    assert find_uses(wiring, "c", ("first/c", "second/c"), {}) == (Use(nodes=(1, 3), entries=(2,)),)


def test_a_weight_may_be_used_in_several_places_and_ways():
    wiring = wired(
        helper.make_node("Transpose", ["first/l"], ["ft"], perm=[1, 0]),
        helper.make_node("Transpose", ["second/l"], ["st"], perm=[1, 0]),
        helper.make_node("MatMul", ["x", "ft"], ["a"]),
        helper.make_node("MatMul", ["a", "st"], ["b"]),
        helper.make_node("Gemm", ["z", "first/l"], ["c"], transB=1),
        helper.make_node("Gemm", ["c", "second/l"], ["y"], transB=1),
        outputs=("b", "y"),
    )
    assert set(find_uses(wiring, "l", ("first/l", "second/l"), {})) == {Use((2, 3), (3,)), Use((4, 5), (5,))}


@pytest.mark.parametrize(
    "nodes",
    [
        [conv("x", "first/c", "y")],
        [conv("x", "first/c", "a"), helper.make_node("Relu", ["a"], ["b"]), conv("b", "second/c", "y")],
        [conv("x", ["first/c", "bias"], "a"), conv("a", "second/c", "y")],
        [conv("x", "first/c", "a", group=2), conv("a", "second/c", "y")],
        [conv("x", "first/c", "a", auto_pad="SAME_UPPER"), conv("a", "second/c", "y")],
        [conv("first/c", "w", "a"), conv("a", "second/c", "y")],
        [conv("x", "first/c", "a"), conv("a", "second/c", "y"), conv("x", "second/c", "z")],
        [conv("x", "first/c", "a"), conv("a", "second/c", "y"), helper.make_node("Relu", ["a"], ["z"])],
    ],
)
def test_what_is_no_pair_is_refused(nodes):
    with pytest.raises(Damaged, match="layer 'c'"):
        find_uses(wired(*nodes), "c", ("first/c", "second/c"), {})


def test_a_layer_that_only_training_uses_is_nowhere():
    assert find_uses(wired(helper.make_node("Relu", ["x"], ["y"])), "c", ("first/c", "second/c"), {}) == ()


def test_values_that_are_made_twice_are_refused():
    """Two Pads that feed each other by such a name would be followed for ever."""
    pads = [helper.make_node("Pad", ["a", "p"], ["b"]), helper.make_node("Pad", ["b", "p"], ["a"])]
    with pytest.raises(Damaged, match="value 'a' is made twice"):
        wired(conv("x", "first/c", "a"), *pads, conv("z", "second/c", "y"))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, None)
    with pytest.raises(Damaged, match="value 'x' is made twice"):
        Wiring(helper.make_graph([helper.make_node("Relu", ["z"], ["x"])], "g", [given], []))


def norm(x, y, **attributes):
    return helper.make_node("BatchNormalization", [x, "s", "b", "m", "v"], [y], **attributes)


SHAPES = {"w": (4, 3, 1, 1), "l": (4, 3), "bias": (4,), "short": (3,), **dict.fromkeys("sbmv", (4,))}


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ([conv("x", "w", "a"), norm("a", "y")], {1: 0}),
        ([conv("x", ["w", "bias"], "a", group=1), norm("a", "y")], {1: 0}),
        ([helper.make_node("Gemm", ["x", "l"], ["a"], transB=1), norm("a", "y")], {1: 0}),
        ([helper.make_node("Gemm", ["x", "l"], ["a"]), norm("a", "y")], {}),
        ([helper.make_node("MatMul", ["x", "l"], ["a"]), norm("a", "y")], {}),
        ([helper.make_node("ConvTranspose", ["x", "w"], ["a"]), norm("a", "y")], {}),
        ([conv("x", ["w", "short"], "a"), norm("a", "y")], {}),
        ([conv("x", "computed", "a"), norm("a", "y")], {}),
        ([conv("x", "w", "a"), norm("a", "y", training_mode=1)], {}),
        ([conv("x", "w", "a"), norm("a", "y"), helper.make_node("Relu", ["a"], ["z"])], {}),
        ([conv("x", "w", "y"), norm("y", "z")], {}),
        ([norm("x", "y")], {}),
    ],
)
def test_normalisation_is_folded_where_nobody_else_looks(nodes, found):
    assert find_foldable(wired(*nodes), SHAPES) == found


@pytest.mark.parametrize("form", ["spatial", "channel"])
def test_merged_geometry_gives_what_the_two_give(form):
    random = np.random.default_rng(0)
    shapes = {"spatial": ((4, 3, 1, 3), (5, 4, 3, 1)), "channel": ((4, 3, 3, 3), (5, 4, 1, 1))}[form]
    first, second = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
    x = random.standard_normal((2, 3, 9, 11)).astype(np.float32)
    if form == "spatial":
        one = conv("x", "f", "a", strides=[1, 2], pads=[0, 2, 0, 1], dilations=[1, 2])
        other = conv("a", "s", "y", strides=[3, 1], pads=[1, 0, 0, 0])
        dense = np.einsum("rixw,orhx->oihw", first, second)
    else:
        one = conv("x", "f", "a", strides=[3, 2], pads=[1, 2, 0, 1], dilations=[1, 2])
        other = conv("a", "s", "y")
        dense = np.einsum("rihw,orxx->oihw", first, second)
    merged = conv("x", "d", "y", **merged_attributes([one, other], (3, 3)))
    weights = {"f": first, "s": second, "d": dense}
    results = [_run(nodes, weights, x) for nodes in ([one, other], [merged])]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-5)


def _run(nodes, weights, x):
    taken = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in weights.items() if name in taken],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


@pytest.mark.parametrize(
    "attributes",
    [
        {"strides": [0, 1]},
        {"strides": [1]},
        {"pads": [-1, 0, 0, 0]},
        {"pads": [1 << 40, 0, 0, 0]},
        {"dilations": [1, 1, 1]},
        {"kernel_shape": [5, 5]},
        {"kernel_shape": 3},
        {"strides": "x"},
    ],
)
def test_absurd_geometry_is_refused(attributes):
    with pytest.raises(Damaged):
        check_geometry(conv("x", "w", "y", **attributes), (3, 3), "c")
