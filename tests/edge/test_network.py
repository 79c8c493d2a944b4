"""Reading a network's file on a device: what is there comes back, and whatever is wrong with it is one line."""

import copy
import json
import random
import tracemalloc

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from sealing import seal, write_arrays

from decomposable_edge import AnySizeSession
from decomposable_edge.errors import ArtifactError, DecomposableError
from decomposable_edge.network import open_network


def refused(path):
    """The one line with which a file is refused."""
    with pytest.raises(ArtifactError) as caught:
        AnySizeSession(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert "\n" not in text
    assert len(text) < 500 + len(str(path))
    return text.removeprefix(f"{path}: ")


@pytest.fixture
def spoilt(tiny_parts, tmp_path):
    """Writes a file whose parts a function has spoilt, with a checksum that is right."""

    def write(spoil):
        model, description, arrays = tiny_parts()
        spoil(model, description, arrays)
        path = tmp_path / "spoilt.safetensors"
        path.write_bytes(seal(model, description, arrays))
        return path

    return write


def test_a_file_made_by_hand_runs_as_numpy_does(tiny, tiny_parts):
    w = {name: array.astype(np.float64) for name, array in tiny_parts()[2].items()}
    x = np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32)
    session = AnySizeSession(tiny)
    for rank in range(1, 7):
        session.resize(ranks={"a": rank, "b": 7 - rank})
        h = np.maximum(x @ (w["second/a"][:rank].T @ w["first/a"][:rank]).T, 0)
        y = h @ (w["second/b"][: 7 - rank].T @ w["first/b"][: 7 - rank]).T
        np.testing.assert_allclose(session.run(x), y, rtol=1e-5, atol=1e-5)


def test_any_flipped_bit_is_found(tiny, tmp_path):
    """At the latest when the tensor that it lies in is needed."""
    content = tiny.read_bytes()
    path = tmp_path / "flipped.safetensors"
    for place in [*range(0, len(content), 3), *range(len(content) - 100, len(content))]:
        changed = bytearray(content)
        changed[place] ^= 1 << (place % 8)
        path.write_bytes(changed)
        with pytest.raises(ArtifactError):
            read_all_of(path)


def read_all_of(path):
    network = open_network(path)
    for layer in network.layers:
        layer.weight()
        layer.first(layer.kept)


def test_any_truncation_is_found(tiny, tmp_path):
    content = tiny.read_bytes()
    path = tmp_path / "short.safetensors"
    for length in [*range(0, len(content), 37), *range(len(content) - 200, len(content))]:
        path.write_bytes(content[:length])
        assert refused(path)
    path.write_bytes(content + b"\0")
    assert refused(path)


def test_other_files_are_refused(tmp_path, tiny_parts):
    path = tmp_path / "other.safetensors"
    for content in (b"", b"not a network", b"\x08" * 500, tiny_parts()[0].SerializeToString()):
        path.write_bytes(content)
        assert "not a whole safetensors file" in refused(path)
    assert "not an ordinary file" in refused(tmp_path)
    with pytest.raises(FileNotFoundError):
        AnySizeSession(tmp_path / "none.safetensors")


def test_files_of_before_and_without_a_graph_are_refused_in_words_of_their_own(tmp_path, tiny_parts):
    model, description, arrays = tiny_parts()
    path = tmp_path / "net.anysize.onnx"
    path.write_bytes(model.SerializeToString())
    assert refused(path).startswith("not a whole safetensors file (")
    path = tmp_path / "net.safetensors"
    write_arrays(path, {**description, "onnx": None}, arrays)
    assert refused(path).startswith("it holds no ONNX graph, which a device needs; allowed: a file of net.save(")
    path.write_bytes(seal(model, {**description, "kind": "size"}, arrays))
    assert refused(path).startswith("it holds 'size', not a network at every size")


def node(model, name):
    return next(node for node in model.graph.node if node.name == name)


def constant(model):
    """A constant of the graph, which is used."""
    tensor = onnx.numpy_helper.from_array(np.zeros(6, np.float32), "bias")
    model.graph.initializer.append(tensor)
    node(model, "second/b").input.append("bias")
    return model.graph.initializer[0]


def external(model, d, a):
    tensor = constant(model)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../etc/passwd")


def external_in_a_constant(model, d, a):
    tensor = TensorProto(name="c", data_type=1, dims=[6], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="secret")
    model.graph.node.insert(0, helper.make_node("Constant", [], ["c"], value=tensor))


def custom_operator(model, d, a):
    model.graph.node.append(helper.make_node("Gelu", ["h"], ["z"], domain="com.example"))
    model.opset_import.append(helper.make_opsetid("com.example", 1))


def a_domain_of_the_runtime(model, d, a):
    model.graph.node.append(helper.make_node("Gelu", ["h"], ["z"], domain="com.microsoft"))


def a_function(model, d, a):
    made = helper.make_function("", "Mine", ["p"], ["q"], [helper.make_node("Relu", ["p"], ["q"])], model.opset_import)
    model.functions.append(made)


def hidden_in_a_branch(model, d, a):
    inner = helper.make_graph([helper.make_node("Bad", [], ["q"], domain="evil")], "g", [], [])
    model.graph.node.append(helper.make_node("If", ["h"], ["z"], then_branch=inner, else_branch=inner))


def lying_shape(model, d, a):
    constant(model).dims[:] = [10**6, 10**6]


def huge_shape(model, d, a):
    constant(model).dims[:] = [2**62, 2**62]


def negative_shape(model, d, a):
    constant(model).dims[:] = [-6, -6]


def other_type(model, d, a):
    constant(model).data_type = TensorProto.INT32


def unknown_type(model, d, a):
    constant(model).data_type = 99


def floats_elsewhere(model, d, a):
    tensor = constant(model)
    tensor.ClearField("raw_data")
    tensor.float_data.extend([0.0] * 6)


def twice(model, d, a):
    model.graph.initializer.append(constant(model))


def weight_is_input(model, d, a):
    model.graph.input.append(helper.make_tensor_value_info("first/a", 1, [6, 6]))


def constant_is_weight(model, d, a):
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((6, 6), np.float32), "first/a"))


def a_huge_input(model, d, a):
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 2**60


def no_input(model, d, a):
    del model.graph.input[:]


def an_input_of_text(model, d, a):
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING


def no_node(model, d, a):
    del model.graph.node[:]


def a_loop_in_the_graph(model, d, a):
    node(model, "first/a").input[0] = "y"


def used_elsewhere(model, d, a):
    model.graph.node.append(helper.make_node("Relu", ["a/between"], ["z"]))


def between_is_an_output(model, d, a):
    model.graph.output.append(helper.make_tensor_value_info("a/between", 1, ["batch", 6]))


def weight_used_otherwise(model, d, a):
    model.graph.node.append(helper.make_node("Relu", ["first/a"], ["z"]))


def not_transposed(model, d, a):
    del node(model, "first/a").attribute[:]


def an_unknown_operator(model, d, a):
    node(model, "a/Relu").op_type = "Nonsense"


def a_bias_of_the_wrong_shape(model, d, a):
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(9, np.float32), "bias"))
    node(model, "second/b").input.append("bias")


def test_what_fails_in_a_run_is_one_line(spoilt):
    session = AnySizeSession(spoilt(a_bias_of_the_wrong_shape))
    with pytest.raises(DecomposableError, match="run: ONNX Runtime failed") as caught:
        session.run(np.zeros((2, 6), np.float32))
    assert "\n" not in str(caught.value)


def sparse(model, d, a):
    values = onnx.numpy_helper.from_array(np.zeros(1, np.float32), "s")
    model.graph.sparse_initializer.add(values=values, dims=[6, 6])


def deep(model, d, a):
    d["info"] = nested = {}
    for _ in range(900):
        nested["x"] = nested = {}


def without_macs(model, description, arrays):
    description["fixed_macs"] = 0
    for layer in description["layers"]:
        layer["dense_macs"] = 0


def setting(*path_and_value):
    *path, last, value = path_and_value

    def spoil(model, description, arrays):
        place = description
        for key in path:
            place = place[key]
        place[last] = value

    spoil.__name__ = f"{'/'.join(map(str, [*path, last]))}={value!r:.20}"
    return spoil


def array(name, make):
    def spoil(model, description, arrays):
        made = make(arrays.get(name))
        arrays.pop(name, None) if made is None else arrays.__setitem__(name, made)

    spoil.__name__ = f"array {name}"
    return spoil


SPOILT = [
    external, external_in_a_constant, custom_operator, a_domain_of_the_runtime, a_function, hidden_in_a_branch,
    lying_shape, huge_shape, negative_shape, other_type, unknown_type, floats_elsewhere, twice, weight_is_input,
    constant_is_weight, a_huge_input, no_input, an_input_of_text, no_node, a_loop_in_the_graph, used_elsewhere,
    between_is_an_output, weight_used_otherwise, not_transposed, an_unknown_operator, sparse, without_macs,
    setting("onnx", {}), setting("onnx", 3), setting("onnx", "lengths", {"t": 0}),
    setting("onnx", "values", {"x": [2, 1]}), setting("state", {}),
    setting("state", "a.weight", {"same_as": "b.weight"}), setting("kind", "any-size"), setting("kind", None),
    setting("layers", []), setting("layers", {}), setting("layers", 0, "name", "c"),
    setting("layers", 1, "name", "a"), setting("layers", 0, "form", "spatial"), setting("layers", 0, "form", 3),
    setting("layers", 0, "shape", [6]), setting("layers", 0, "shape", [6, 0]),
    setting("layers", 0, "shape", [6, 2**40]), setting("layers", 0, "shape", [2**30, 2**30]),
    setting("layers", 0, "shape", [6, 6, 1, 1]), setting("layers", 0, "dense_macs", -1),
    setting("layers", 0, "dense_macs", 2**62), setting("layers", 0, "macs_per_rank", 1.5), setting("fixed_macs", "0"),
    setting("fixed_params", 2**62), setting("fixed_params", None), setting("layer_before_norm", {"n": "nobody"}),
    setting("layer_before_norm", []), setting("statistics", {}),
    setting("statistics", {"names": [], "channels": [], "has_explicit_full": False}),
    setting("statistics", {"names": ["n"], "channels": [2**50], "has_explicit_full": False}), setting("info", None),
    array("scores/a", lambda a: a[::-1].copy()), array("scores/a", lambda a: a * np.nan),
    array("scores/b", lambda a: a[:-1]), array("scores/a", lambda a: a.astype(np.float32)),
    array("scores/a", lambda a: None), array("first/a", lambda a: a[:, :5].copy()), array("first/a", lambda a: None),
    array("second/b", lambda a: a[:3]), array("second/b", lambda a: a.astype(np.float64)),
    array("first/a", lambda a: a.astype(np.int32)), array("state/a.weight", lambda a: a[:5]),
    array("state/a.weight", lambda a: None), array("state/b.weight", lambda a: a.astype(np.float16)),
    array("limits/lower", lambda a: a * 0), array("limits/upper", lambda a: a * 100),
    array("limits/upper", lambda a: a.astype(np.int32)), array("extra", lambda a: np.zeros(3)),
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_a_careless_or_hostile_file_is_one_line(spoilt, spoil):
    assert refused(spoilt(spoil))


def test_deep_json_is_no_crash(spoilt):
    path = spoilt(deep)
    assert "x" in AnySizeSession(path).info


def test_a_graph_that_is_none(tiny_parts, tmp_path):
    _, description, arrays = tiny_parts()
    path = tmp_path / "text.safetensors"
    for content in (b"", b"{", b"\xff" * 100, b"not a graph"):
        path.write_bytes(seal(content, description, arrays))
        assert refused(path)


def test_no_memory_is_taken_for_a_claim(spoilt):
    claims = [lying_shape, huge_shape, a_huge_input, setting("layers", 0, "shape", [2**30, 2**30])]
    for claim in claims:
        path = spoilt(claim)
        tracemalloc.start()
        refused(path)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 5_000_000


VALUES = [None, True, -1, 0, 1, 7, 2**31, 2**63, 1.5, "", "a", "b", "channel", [], {}, [1], [[1, 2]], {"a": 1}]


def _mutate(value, chance):
    """Another value somewhere inside a description."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _mutate(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], _mutate(value[place], chance), *value[place + 1 :]]
    return chance.choice(VALUES)


def _mutate_graph(model, chance):
    """A graph with some of its bytes, or some of its connections, changed; None where it cannot be read any more."""
    if chance.random() < 0.5:
        names = [name for node in model.graph.node for name in (*node.input, *node.output)]
        some = chance.choice(list(model.graph.node))
        field = chance.choice([some.input, some.output])
        if field:
            field[chance.randrange(len(field))] = chance.choice(names)
        return model
    content = bytearray(model.SerializeToString())
    for _ in range(chance.randrange(1, 4)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    try:
        return onnx.ModelProto.FromString(bytes(content))
    except Exception:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_files_changed_at_random_are_run_or_refused(tiny_parts, tmp_path, seed):
    """With checksums that are right, so that it is the reader that is tested."""
    chance = random.Random(seed)
    path = tmp_path / "random.safetensors"
    whole, lines = tiny_parts(), []
    for i in range(150):
        model, description, arrays = copy.deepcopy(whole)
        if i % 2:
            description = _mutate(description, chance)
        else:
            model = _mutate_graph(model, chance)
        if model is None or not isinstance(description, dict):
            continue
        try:
            path.write_bytes(seal(model, json.loads(json.dumps(description)), arrays))
        except UnicodeDecodeError:
            continue
        try:
            session = AnySizeSession(path, ratio=0.5, threads=1)
        except DecomposableError as error:
            lines.append(str(error))
            continue
        session.resize(ratio=1.0)
    assert len(lines) > 50
    assert not any("\n" in line for line in lines)
