"""Recurrent layers in a bundle: what a session makes of them, and that no other loop is run."""

import numpy as np
import onnx
import pytest
import torch
from sealing import seal, unseal
from torch import nn

import decomposable as dn
from decomposable_edge import AnySizeSession
from decomposable_edge.building import build
from decomposable_edge.errors import ArtifactError
from decomposable_edge.network import open_network
from decomposable_edge.sizing.plans import SizeRequest

X = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(0))


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(8, 12, batch_first=True, bidirectional=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def made(kind, folder):
    torch.manual_seed(0)
    net = dn.decompose(Tagger(kind).eval(), X)
    path = folder / f"{kind.__name__}.safetensors"
    net.save(path, onnx=True)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recurrent")


@pytest.fixture(scope="module")
def lstm(folder):
    return made(nn.LSTM, folder)


@pytest.fixture(scope="module")
def gru(folder):
    return made(nn.GRU, folder)


def operators(bundle, plan):
    return [node.op_type for node in onnx.ModelProto.FromString(build(bundle, plan).content).graph.node]


def test_dense_layers_are_one_operator_and_others_a_loop(lstm):
    bundle = open_network(lstm)
    full, small = (operators(bundle, plan) for plan in (bundle.selector.full_plan(), bundle.selector.smallest_plan()))
    assert (full.count("LSTM"), full.count("Scan")) == (2, 0)
    assert (small.count("LSTM"), small.count("Scan")) == (0, 2)
    mixed = bundle.selector.plan_for(SizeRequest(ranks={"layer.hh_l0": 2}))
    assert operators(bundle, mixed).count("LSTM") == operators(bundle, mixed).count("Scan") == 1


def test_a_size_takes_the_weights_of_its_ranks(gru):
    bundle = open_network(gru)
    ranks = {"layer.hh_l0": 2, "layer.hh_l0_reverse": 3}
    weights = onnx.ModelProto.FromString(
        build(bundle, bundle.selector.plan_for(SizeRequest(ranks=ranks))).content
    ).graph.initializer
    shapes = {tensor.name: tuple(tensor.dims) for tensor in weights}
    assert shapes["first/layer.hh_l0"] == (2, 12)
    assert shapes["second/layer.hh_l0"] == (36, 2)
    assert shapes["first/layer.hh_l0_reverse"] == (3, 12)


def test_tuned_biases_are_those_of_the_size(tmp_path):
    torch.manual_seed(0)
    net = dn.decompose(Tagger(nn.GRU).eval(), X)
    net.tune_([X] * 4, sizes=[0.5, 0.8], steps=5, distance=lambda low, full: (low - full).square().mean())
    net.save(tmp_path / "net.safetensors", onnx=True)
    session = AnySizeSession(tmp_path / "net.safetensors")
    for size in (0.5, 0.65, 0.8, 1.0):
        net.resize_(session.resize(macs=size))
        with torch.no_grad():
            np.testing.assert_allclose(session.run(X.numpy()), net(X).numpy(), atol=2e-5)


def recurrent(model):
    return next(node for node in model.graph.node if node.op_type == "Recurrence")


def told(model, name):
    return next(a for a in recurrent(model).attribute if a.name == name)


def another_mode(model):
    told(model, "mode").s = b"GRU" if told(model, "mode").s == b"LSTM" else b"LSTM"


def no_mode(model):
    told(model, "mode").s = b"\xff"


def a_mode_of_another_kind(model):
    told(model, "backwards").name = "mode"


def other_counts(model):
    told(model, "counts").ints[:] = [2, 2]


def counts_that_wrap_around(model):
    told(model, "counts").ints[:] = [2, 2**62, 2**62]


def negative_counts(model):
    told(model, "counts").ints[:] = [2, 3, -1]


def another_operator_of_our_own(model):
    recurrent(model).op_type = "Other"


def a_stage_too_few(model):
    taken = list(recurrent(model).input)
    del recurrent(model).input[:]
    recurrent(model).input.extend(taken[:-1])
    told(model, "counts").ints[1] -= 1


def stages_swapped(model):
    taken = recurrent(model).input
    taken[-1], taken[-2] = taken[-2], taken[-1]


def an_output_too_many(model):
    recurrent(model).output.append("more")


def no_weight(model):
    *_, hh = recurrent(model).input
    recurrent(model).input[-1] = ""
    model.graph.node.append(onnx.helper.make_node("Identity", [hh], ["seen"]))


def inside_of_a_branch(model):
    inner = onnx.helper.make_graph([recurrent(model)], "branch", [], [])
    model.graph.node.append(onnx.helper.make_node("If", ["x"], ["z"], then_branch=inner, else_branch=inner))


def a_scan(model):
    body = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["a"], ["b"])], "step", [], [])
    model.graph.node.append(onnx.helper.make_node("Scan", ["x"], ["z"], body=body, num_scan_inputs=1))


def a_loop(model):
    recurrent(model).op_type, recurrent(model).domain = "Loop", ""


def a_bias_of_another_length(model, arrays):
    [name] = [name for name in arrays if name.endswith("hh_l0.bias")]
    arrays[name] = np.zeros(7, np.float32)


SPOILT = [
    another_mode, no_mode, a_mode_of_another_kind, other_counts, counts_that_wrap_around, negative_counts,
    another_operator_of_our_own, a_stage_too_few, stages_swapped, an_output_too_many, no_weight, inside_of_a_branch,
    a_scan, a_loop, a_bias_of_another_length,
]  # fmt: skip


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_loop_that_is_no_recurrent_layer_is_refused(spoil, kind, request, tmp_path):
    path = tmp_path / "spoilt.safetensors"
    path.write_bytes(resealed(request.getfixturevalue(kind), spoil))
    with pytest.raises(ArtifactError) as caught:
        AnySizeSession(path)
    assert "\n" not in str(caught.value)
    assert "Runtime" not in str(caught.value)  # it did not come that far


def resealed(path, spoil):
    model, description, arrays = unseal(path)
    spoil(model, arrays) if spoil is a_bias_of_another_length else spoil(model)
    return seal(model, description, arrays)


def test_what_is_not_spoilt_is_read(lstm, tmp_path):
    path = tmp_path / "again.safetensors"
    path.write_bytes(resealed(lstm, lambda model: None))
    np.testing.assert_array_equal(AnySizeSession(path).run(X.numpy()), AnySizeSession(lstm).run(X.numpy()))
