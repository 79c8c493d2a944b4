"""A recurrent layer in an ONNX graph: one operator where its weights are dense, else a `Scan` over the steps of time.

    x ─┬─ MatMul, Add ─── gates of all steps ─── Scan ─┬─ y    with Gemm after Gemm for the stages of hh inside
       └─ LSTM, GRU or RNN ────────────────────────────┘      where hh is one dense weight

A file has the first form only. The one that writes files and the one that reads them make its nodes by this code: what
it does not make is not taken. A `Scan` ends when its input does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, helper

from decomposable_edge.fields import Damaged, require
from decomposable_edge.graph import Wiring, attribute
from decomposable_edge.onnx_model import Array, inner_graphs

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}  # of the operator's gates among PyTorch's: i f g o, and r z n


@dataclass(frozen=True, kw_only=True)
class Recurrence:
    """One layer in one direction, by the names of values and weights in a graph."""

    mode: str
    backwards: bool
    x: str
    states: tuple[str, ...]  # the first h, and of an LSTM c
    ih: str
    biases: tuple[str, ...]  # of ih and hh, or none
    hh: tuple[str, ...]  # the stages of a chain; one where it is dense
    hr: tuple[str, ...]  # those of projections, if there are any
    y: str  # all outputs
    last: str  # the last c of an LSTM, else the last h

    def value(self, name: str) -> str:
        """What a value inside is called."""
        return f"{self.y}/{name}"


def in_steps(one: Recurrence, kind: int) -> list[NodeProto]:
    """The nodes that run it step by step, the `Scan` last; `kind` is the type of its weights."""
    make, name = helper.make_node, one.value
    nodes = [
        make("Transpose", [one.ih], [name("ih")], perm=[1, 0]),
        make("MatMul", [one.x, name("ih")], [name("product")], name=one.ih),
    ]
    bias = one.biases[0] if one.biases else ""
    if one.biases and one.mode != "GRU":  # whose other bias is multiplied by a gate
        bias = name("bias")
        nodes.append(make("Add", list(one.biases), [bias]))
    if bias:
        nodes.append(make("Add", [name("product"), bias], [name("gates")]))
    return [*nodes, _scan(one, kind)]


def _scan(one: Recurrence, kind: int) -> NodeProto:
    name = one.value
    gates = name("gates" if one.biases else "product")
    states = ["h", "c"][: len(one.states)]
    nodes, last = _body(one)
    ports = [helper.make_tensor_value_info(name(each), kind, None) for each in (*states, "g")]
    results = [helper.make_tensor_value_info(each, kind, None) for each in (*last, name("put"))]
    nodes.append(helper.make_node("Identity", [last[0]], [name("put")]))
    outputs = [name("last"), one.last, one.y] if len(states) == 2 else [one.last, one.y]
    return helper.make_node(
        "Scan",
        [*one.states, gates],
        outputs,
        body=helper.make_graph(nodes, one.mode, ports, results),
        num_scan_inputs=1,
        scan_input_directions=[int(one.backwards)],
        scan_output_directions=[int(one.backwards)],
    )


def _body(one: Recurrence) -> tuple[list[NodeProto], list[str]]:
    """One step: its nodes, and the names of the state behind it."""
    name, nodes = one.value, list[NodeProto]()

    def put(kind: str, inputs: list[str], *outputs: str, **options: object) -> str:
        nodes.append(helper.make_node(kind, list(map(name, inputs)), list(map(name, outputs)), **options))
        return outputs[0]

    def multiplied(value: str, stages: tuple[str, ...], bias: str, letter: str) -> str:
        for i, weight in enumerate(stages):
            behind = f"{letter}{i}"
            inputs = [name(value), weight, *([bias] if bias and i == len(stages) - 1 else [])]
            nodes.append(helper.make_node("Gemm", inputs, [name(behind)], name=weight, transB=1))
            value = behind
        return value

    of_state = multiplied("h", one.hh, one.biases[1] if one.biases and one.mode == "GRU" else "", "u")
    if one.mode == "GRU":
        put("Split", ["g"], "r_x", "z_x", "n_x", axis=-1, num_outputs=3)
        put("Split", [of_state], "r_h", "z_h", "n_h", axis=-1, num_outputs=3)
        for letter in "rz":
            put("Add", [f"{letter}_x", f"{letter}_h"], f"{letter}_sum")
            put("Sigmoid", [f"{letter}_sum"], letter)
        put("Mul", ["r", "n_h"], "n_reset")
        put("Add", ["n_x", "n_reset"], "n_sum")
        put("Tanh", ["n_sum"], "n")
        put("Sub", ["h", "n"], "less")
        put("Mul", ["z", "less"], "part")
        return nodes, [name(put("Add", ["n", "part"], "h_next"))]
    put("Add", ["g", of_state], "total")
    if one.mode != "LSTM":
        return nodes, [name(put("Relu" if one.mode == "RNN_RELU" else "Tanh", ["total"], "h_next"))]
    put("Split", ["total"], "i_sum", "f_sum", "g_sum", "o_sum", axis=-1, num_outputs=4)
    for letter, kind in zip("ifgo", ("Sigmoid", "Sigmoid", "Tanh", "Sigmoid"), strict=True):
        put(kind, [f"{letter}_sum"], f"{letter}_gate")
    put("Mul", ["f_gate", "c"], "kept")
    put("Mul", ["i_gate", "g_gate"], "new")
    put("Add", ["kept", "new"], "c_next")
    put("Tanh", ["c_next"], "c_tanh")
    h = put("Mul", ["o_gate", "c_tanh"], "h_next")
    return nodes, [name(multiplied(h, one.hr, "", "p")), name("c_next")]


def can_be_operator(one: Recurrence, arrays: Mapping[str, Array]) -> bool:
    """Whether ONNX has an operator for it, which ONNX Runtime's CPU has for float32; and its weights are known."""
    names = (one.ih, *one.hh, *one.biases)
    is_known = all(name in arrays and arrays[name].dtype == np.float32 for name in names)
    return is_known and len(one.hh) == 1 and not one.hr


def as_operator(one: Recurrence, arrays: Mapping[str, Array]) -> tuple[list[NodeProto], dict[str, Array]]:
    """The nodes that run it as one operator, and the weights that these take."""
    make, name = helper.make_node, one.value
    weights = {name(to): _ordered(one.mode, arrays[at])[None] for to, at in (("W", one.ih), ("R", one.hh[0]))}
    if one.biases:
        weights[name("B")] = np.concatenate([_ordered(one.mode, arrays[each]) for each in one.biases])[None]
    width = weights[name("R")].shape[-1]
    first, second = name("axis_0"), name("axis_1")
    axes = {first: np.zeros(1, np.int64), second: np.ones(1, np.int64)}
    nodes = [make("Unsqueeze", [each, first], [name(f"first_{i}")]) for i, each in enumerate(one.states)]
    firsts = [name(f"first_{i}") for i in range(len(one.states))]
    options: dict[str, object] = {"hidden_size": width, "direction": "reverse" if one.backwards else "forward"}
    if one.mode == "GRU":
        options["linear_before_reset"] = 1
    if one.mode == "RNN_RELU":
        options["activations"] = ["Relu"]
    kind, is_lstm = one.mode.partition("_")[0], one.mode == "LSTM"
    outputs = [name("all"), "", name("ends")] if is_lstm else [name("all"), name("ends")]
    inputs = [one.x, name("W"), name("R"), name("B") if one.biases else "", "", *firsts]
    nodes.append(make(kind, inputs, outputs, **options))
    nodes.append(make("Squeeze", [name("all"), second], [one.y]))
    nodes.append(make("Squeeze", [name("ends"), first], [one.last]))
    return nodes, weights | axes


def _ordered(mode: str, array: Array) -> Array:
    """A weight or bias with its gates in the operator's order."""
    parts = np.split(array, GATES[mode])
    return np.concatenate([parts[i] for i in _ORDER.get(mode, (0,))])


@dataclass(frozen=True, kw_only=True)
class Found:
    """A recurrence in a graph, and the indices of its nodes: of the `Scan`, of the product with ih's last stage, and of
    all that an operator does without.
    """

    recurrence: Recurrence
    kind: int
    scan: int
    product: int
    before: tuple[int, ...]


def find_recurrences(wiring: Wiring) -> tuple[Found, ...]:
    """All recurrences of a graph; a `Scan` that is none is refused, for it may do anything."""
    scans = [i for i, node in enumerate(wiring.nodes) if node.op_type == "Scan"]
    return tuple(_found(wiring, index) for index in scans)


def _found(wiring: Wiring, index: int) -> Found:
    node = wiring.nodes[index]
    calibration_warning = f"node '{node.name:.60}' is a loop that is no recurrent layer"
    try:
        one, kind = _read(wiring, node)
        before = [wiring.makers[one.value(each)] for each in _between(one)]
    except (IndexError, KeyError, ValueError) as error:
        raise Damaged(calibration_warning) from error
    wanted, there = in_steps(one, kind), [wiring.nodes[i] for i in (*before, index)]
    require(list(map(_nameless, wanted)) == list(map(_nameless, there)), calibration_warning)
    is_alone = all(wiring.only_taker(one.value(each)) is not None for each in _between(one))
    require(is_alone, f"node '{node.name:.60}': what lies between the parts of a recurrent layer is used elsewhere")
    return Found(recurrence=one, kind=kind, scan=index, product=before[1], before=tuple(before))


def check_shapes(one: Recurrence, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights that are not those of as many gates as there are; `shapes` are the weights' of a graph."""
    given = {name: shapes[name] for name in (one.ih, *one.hh, *one.hr, *one.biases) if name in shapes}
    is_right = all(len(shape) == (1 if name in one.biases else 2) for name, shape in given.items())
    rows = {given[name][0] for name in (one.ih, one.hh[-1], *one.biases) if given.get(name)}
    is_right = is_right and len(rows) <= 1 and all(row > 0 and row % GATES[one.mode] == 0 for row in rows)
    require(is_right, f"the weights of a recurrent layer, '{one.ih:.60}' and others, do not match")


def _between(one: Recurrence) -> list[str]:
    """The values that the nodes before the `Scan` make, in order."""
    if not one.biases:
        return ["ih", "product"]
    return ["ih", "product", "gates"] if one.mode == "GRU" else ["ih", "product", "bias", "gates"]


def _read(wiring: Wiring, node: NodeProto) -> tuple[Recurrence, int]:
    """What a `Scan` would be if it is a recurrence; whoever asks compares."""
    (body,), states = inner_graphs(node), tuple(node.input[:-1])
    mode, y = body.name, node.output[-1]
    gemms = {inner.output[0]: list(inner.input) for inner in body.node if inner.op_type == "Gemm"}
    hh, hr = ([gemms[name] for name in gemms if name.startswith(f"{y}/{letter}")] for letter in "up")
    product = wiring.nodes[wiring.makers[f"{y}/product"]]
    transposed = wiring.nodes[wiring.makers[f"{y}/ih"]]
    biases: tuple[str, ...] = ()
    if f"{y}/gates" in wiring.makers:
        added = wiring.nodes[wiring.makers[f"{y}/gates"]].input[1]
        biases = (added, *hh[-1][2:]) if mode == "GRU" else tuple(wiring.nodes[wiring.makers[added]].input)
    one = Recurrence(
        mode=body.name,
        backwards=attribute(node, "scan_input_directions", list[int]()) == [1],
        x=product.input[0],
        states=states,
        ih=transposed.input[0],
        biases=biases,
        hh=tuple(inputs[1] for inputs in hh),
        hr=tuple(inputs[1] for inputs in hr),
        y=y,
        last=node.output[-2],
    )
    is_possible = mode in GATES and len(states) == (2 if mode == "LSTM" else 1) and len(biases) in (0, 2) and one.hh
    require(bool(is_possible), f"node '{node.name:.60}' is a loop that is no recurrent layer")
    return one, int(body.input[0].type.tensor_type.elem_type)


def _nameless(node: NodeProto) -> NodeProto:
    other = NodeProto()
    other.CopyFrom(node)
    other.ClearField("name")
    return other
