"""A recurrent layer in an ONNX graph: one operator where its weights are dense, else a `Scan` over the steps of time.

    Recurrence ─┬─ MatMul, Add ─── gates of all steps ─── Scan    with Gemm after Gemm for the stages of hh inside
                └─ LSTM, GRU or RNN                               where hh is one dense weight

While a network is exported, and in a file, one node of our own stands for the layer: it says what the layer is, and
takes its input, its state and all its weights. Nothing but what these functions put in its place is ever run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from onnx import NodeProto, helper

from decomposable_edge.fields import require
from decomposable_edge.file.container import Array
from decomposable_edge.graph import attribute

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_ORDER = {"LSTM": (0, 3, 1, 2), "GRU": (1, 0, 2)}  # of the operator's gates among PyTorch's: i f g o, and r z n
_STEPS = {
    "LSTM": (
        "Add g u > total",
        "Split total > i_sum f_sum g_sum o_sum",
        "Sigmoid i_sum > i_gate",
        "Sigmoid f_sum > f_gate",
        "Tanh g_sum > g_gate",
        "Sigmoid o_sum > o_gate",
        "Mul f_gate c > kept",
        "Mul i_gate g_gate > new",
        "Add kept new > c_next",
        "Tanh c_next > c_tanh",
        "Mul o_gate c_tanh > h_next",
    ),
    "GRU": (
        "Split g > r_x z_x n_x",
        "Split u > r_h z_h n_h",
        "Add r_x r_h > r_sum",
        "Sigmoid r_sum > r",
        "Add z_x z_h > z_sum",
        "Sigmoid z_sum > z",
        "Mul r n_h > n_reset",
        "Add n_x n_reset > n_sum",
        "Tanh n_sum > n",
        "Sub h n > less",
        "Mul z less > part",
        "Add n part > h_next",
    ),
    "RNN_TANH": ("Add g u > total", "Tanh total > h_next"),
    "RNN_RELU": ("Add g u > total", "Relu total > h_next"),
}
"""One step: operators, what they take, and what they make. g are gates by the input, u by the state; h, c the state."""


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

    @classmethod
    def of(cls, node: NodeProto) -> Recurrence:
        """Return what a node of our own says."""
        mode, counts = attribute(node, "mode", b"").decode(errors="replace"), attribute(node, "counts", list[int]())
        counts = [1, 2 if mode == "LSTM" else 1, 1, *counts]
        ends = list(accumulate(counts, initial=0))
        is_right = mode in GATES and len(counts) == 6 and counts[3] in (0, 2) and counts[4] > 0 <= counts[5]
        is_right = is_right and ends[-1] == len(node.input) and len(node.output) == 2
        require(is_right and all((*node.input, *node.output)), f"node '{node.name:.60}' is no recurrent layer")
        (x,), states, (ih,), biases, hh, hr = (tuple(node.input[a:b]) for a, b in pairwise(ends))
        y, last = node.output
        backwards = bool(attribute(node, "backwards", 0))
        return cls(
            mode=mode, backwards=backwards, x=x, states=states, ih=ih, biases=biases, hh=hh, hr=hr, y=y, last=last
        )

    def value(self, name: str) -> str:
        """Return what a value inside is called."""
        return f"{self.y}/{name}"

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse weights that are not those of as many gates as there are; `shapes` are those of a graph's weights."""
        given = {name: shapes[name] for name in (self.ih, *self.hh, *self.hr, *self.biases) if name in shapes}
        is_right = all(len(shape) == (1 if name in self.biases else 2) for name, shape in given.items())
        rows = {given[name][0] for name in (self.ih, self.hh[-1], *self.biases) if given.get(name)}
        is_right = is_right and self.ih in given and len(rows) == 1
        is_right = is_right and all(row > 0 and row % GATES[self.mode] == 0 for row in rows)
        require(is_right, f"the weights of a recurrent layer, '{self.ih:.60}' and others, do not match")


def in_steps(one: Recurrence, kind: int) -> list[NodeProto]:
    """Return the nodes that run it step by step; `kind` is ONNX's number for the type of its weights."""
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
    states = ["h", "c"][: len(one.states)]
    step, last = _one_step(one)
    step.append(make("Identity", [last[0]], [name("put")]))
    ports = [helper.make_tensor_value_info(name(each), kind, None) for each in (*states, "g")]
    results = [helper.make_tensor_value_info(each, kind, None) for each in (*last, name("put"))]
    scan = make(
        "Scan",
        [*one.states, name("gates" if bias else "product")],
        [name("last"), one.last, one.y] if len(states) == 2 else [one.last, one.y],
        body=helper.make_graph(step, one.mode, ports, results),
        num_scan_inputs=1,
        scan_input_directions=[int(one.backwards)],
        scan_output_directions=[int(one.backwards)],
    )
    return [*nodes, scan]


def _one_step(one: Recurrence) -> tuple[list[NodeProto], list[str]]:
    """Return the nodes of one step, and the names of the state behind it."""
    name, nodes = one.value, list[NodeProto]()

    def multiplied(value: str, stages: tuple[str, ...], bias: str, letter: str) -> str:
        for i, weight in enumerate(stages):
            inputs = [name(value), weight, *([bias] if bias and i == len(stages) - 1 else [])]
            value = f"{letter}{i}"
            nodes.append(helper.make_node("Gemm", inputs, [name(value)], name=weight, transB=1))
        return value

    gates = multiplied("h", one.hh, one.biases[1] if one.biases and one.mode == "GRU" else "", "u")
    for line in _STEPS[one.mode]:
        (kind, *taken), made = (part.split() for part in line.split(" > "))
        options = {"axis": -1, "num_outputs": len(made)} if kind == "Split" else {}
        inputs = [name(gates if each == "u" else each) for each in taken]
        nodes.append(helper.make_node(kind, inputs, list(map(name, made)), **options))
    h = multiplied("h_next", one.hr, "", "p")
    return nodes, [name(h), name("c_next")][: len(one.states)]


def can_be_operator(one: Recurrence, arrays: Mapping[str, Array]) -> bool:
    """Return whether ONNX has an operator for it, which ONNX Runtime's CPU has for float32; its weights are known."""
    names = (one.ih, *one.hh, *one.biases)
    is_known = all(name in arrays and arrays[name].dtype == np.float32 for name in names)
    return is_known and len(one.hh) == 1 and not one.hr


def as_operator(one: Recurrence, arrays: Mapping[str, Array]) -> tuple[list[NodeProto], dict[str, Array]]:
    """Return the nodes that run it as one operator, and the weights that these take."""
    make, name, kind = helper.make_node, one.value, one.mode.partition("_")[0]
    weights = {name(to): _ordered(one.mode, arrays[at])[None] for to, at in (("W", one.ih), ("R", one.hh[0]))}
    if one.biases:
        weights[name("B")] = np.concatenate([_ordered(one.mode, arrays[each]) for each in one.biases])[None]
    first, second = name("axis_0"), name("axis_1")
    axes = {first: np.zeros(1, np.int64), second: np.ones(1, np.int64)}
    firsts = [name(f"first_{i}") for i in range(len(one.states))]
    options: dict[str, object] = {"hidden_size": weights[name("R")].shape[-1]}
    options["direction"] = "reverse" if one.backwards else "forward"
    if kind == "GRU":
        options["linear_before_reset"] = 1
    if one.mode == "RNN_RELU":
        options["activations"] = ["Relu"]
    inputs = [one.x, name("W"), name("R"), name("B") if one.biases else "", "", *firsts]
    outputs = [name("all"), *([""] if kind == "LSTM" else []), name("ends")]
    nodes = [make("Unsqueeze", [state, first], [to]) for state, to in zip(one.states, firsts, strict=True)]
    nodes.append(make(kind, inputs, outputs, **options))
    nodes.append(make("Squeeze", [name("all"), second], [one.y]))
    nodes.append(make("Squeeze", [name("ends"), first], [one.last]))
    return nodes, weights | axes


def _ordered(mode: str, array: Array) -> Array:
    """Return a weight or bias with its gates in the operator's order."""
    parts = np.split(array, GATES[mode])
    return np.concatenate([parts[i] for i in _ORDER.get(mode, (0,))])
