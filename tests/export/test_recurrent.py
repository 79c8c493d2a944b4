"""Recurrent layers in exported files: one operator, or a loop over any number of steps, with the numbers of PyTorch."""

import io

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import decomposable as dn
from decomposable.export.any_size import save_with_graph
from decomposable.export.program import ExportError
from decomposable_edge import AnySizeSession

X = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(0))
LONG = torch.randn(2, 19, 8, generator=torch.Generator().manual_seed(1))
DYNAMIC = {"input": {1: "length"}}


class Recurrent(nn.Module):
    """One such layer, whose outputs and last states are all returned."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layer = kind(8, 12, batch_first=True, **options)

    def forward(self, x):
        y, states = self.layer(x)
        return y, states


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 12, num_layers=2, bias=False)

    def forward(self, x):
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


class Unbatched(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(8, 12, bidirectional=True)

    def forward(self, x):
        y, h = self.layer(x.mean(0))
        return y + x.sum() * 0, h


class Learned(nn.Module):
    """With first states that are weights of the model."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.h, self.c = (nn.Parameter(torch.randn(2, 1, 12)) for _ in range(2))

    def forward(self, x):
        states = [each.expand(-1, x.shape[0], -1).contiguous() for each in (self.h, self.c)]
        return self.layer(x, tuple(states))


MODELS = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "lstm, layers, both ways": lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm, projections": lambda: Recurrent(nn.LSTM, num_layers=2, proj_size=6, bidirectional=True),
    "gru, layers, both ways": lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True),
    "gru, no bias": lambda: Recurrent(nn.GRU, bias=False),
    "rnn": lambda: Recurrent(nn.RNN, bidirectional=True),
    "rnn, relu": lambda: Recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "time first": TimeFirst,
    "unbatched": Unbatched,
    "learned states": Learned,
}


def make(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    return model, dn.decompose(model, X)


def flat(returned):
    if isinstance(returned, torch.Tensor):
        return [returned]
    return [tensor for each in returned for tensor in flat(each)]


@torch.no_grad()
def wanted(net, x):
    return [tensor.numpy() for tensor in flat(net(x))]


def check_close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("name", MODELS)
def test_one_size_has_the_numbers_of_pytorch_at_any_length(name, tmp_path):
    model, net = make(name)
    for size in (1.0, net.selector.smallest_size):
        path = tmp_path / "net.onnx"
        dn.export_onnx(net, path, macs=size, dynamic=DYNAMIC)
        net.resize_(macs=size)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        for x in (X, LONG, LONG[:1, :1]):
            found = session.run(None, {"input": x.numpy()})
            check_close(found, wanted(net, x))
            if size == 1.0:
                check_close(found, wanted(model, x))
        is_operator = size == 1.0 and "projections" not in name
        kinds = set(operators(path)) & {"LSTM", "GRU", "RNN", "Scan"}
        assert kinds == ({name.split(",")[0].upper()} if is_operator and name[:3] in ("lst", "gru", "rnn") else kinds)
        assert ("Scan" in kinds) != is_operator


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_has_them_at_every_size(name, tmp_path):
    model, net = make(name)
    path = tmp_path / "net.safetensors"
    net.save(path, onnx=True, dynamic=DYNAMIC)
    session = AnySizeSession(path)
    check_close(as_list(session.run(LONG.numpy())), wanted(model, LONG))
    for size in (0.9, 0.6, 0.4, net.selector.smallest_size):
        if size < net.selector.smallest_size:
            continue
        plan = session.resize(macs=size)
        net.resize_(plan)
        for x in (X, LONG, LONG[:1, :1]):
            check_close(as_list(session.run(x.numpy())), wanted(net, x))


def as_list(found):
    return found if isinstance(found, list) else [found]


def test_a_bundle_runs_dense_layers_in_any_mixture(tmp_path):
    _, net = make("lstm, projections")
    net.save(tmp_path / "net.safetensors", onnx=True)
    session = AnySizeSession(tmp_path / "net.safetensors")
    names = list(net.plan().ranks)
    for dense in (names[::2], names[1::2], [n for n in names if "hh" in n], [n for n in names if "hr" in n]):
        ranks = {name: 2 for name in names if name not in dense}
        session.resize(ranks=ranks)
        net.resize_(ranks=ranks)
        check_close(session.run(X.numpy()), wanted(net, X))


def test_only_some_weights_are_decomposed(tmp_path):
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM, bidirectional=True).eval()
    for kind in ("ih", "hh", "l0_reverse"):
        net = dn.decompose(model, X, filter_fn=lambda _, name, kind=kind: kind in name)
        net.save(tmp_path / "net.safetensors", onnx=True)
        session = AnySizeSession(tmp_path / "net.safetensors")
        check_close(session.run(X.numpy()), wanted(model, X))
        net.resize_(session.resize(macs=0.5 * (1 + net.selector.smallest_size)))
        check_close(session.run(X.numpy()), wanted(net, X))


def test_a_file_does_not_grow_with_the_number_of_steps(tmp_path):
    counts = set()
    for steps in (2, 40):
        torch.manual_seed(0)
        net = dn.decompose(Recurrent(nn.LSTM).eval(), torch.randn(1, steps, 8))
        dn.export_onnx(net, tmp_path / "net.onnx", macs=0.5)
        counts.add(len(operators(tmp_path / "net.onnx")))
    assert len(counts) == 1


@pytest.mark.parametrize("name", ["lstm, projections", "gru, layers, both ways", "rnn", "unbatched", "learned states"])
def test_a_program_of_pytorch_needs_nothing_of_ours(name, tmp_path):
    _, net = make(name)
    for size in (1.0, net.selector.smallest_size):
        dn.export_torch(net, tmp_path / "net.pt2", macs=size, dynamic=DYNAMIC)
        net.resize_(macs=size)
        program = torch.export.load(io.BytesIO((tmp_path / "net.pt2").read_bytes()))
        nodes = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert not any("decomposable" in node for node in nodes)
        for x in (X, LONG):
            check_close([t.detach().numpy() for t in flat(program.module()(x))], wanted(net, x))


def test_double_precision_runs_step_by_step(tmp_path):
    """ONNX Runtime's operators take float32 only."""
    torch.manual_seed(0)
    net = dn.decompose(Recurrent(nn.GRU, bidirectional=True).eval().double(), X.double())
    for size in (1.0, 0.5):
        dn.export_onnx(net, tmp_path / "net.onnx", macs=size)
        assert operators(tmp_path / "net.onnx").count("Scan") == 2
        net.resize_(macs=size)
        session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
        for one, other in zip(session.run(None, {"input": X.double().numpy()}), wanted(net, X.double()), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_in_one_line(dtype, tmp_path):
    net = dn.decompose(Recurrent(nn.GRU).eval(), X).to(dtype)
    with pytest.raises(ExportError, match="does not run recurrent layers in half precision; allowed: float32 and flo"):
        dn.export_onnx(net, tmp_path / "net.onnx", macs=0.5, example_input=X.to(dtype))
    with pytest.raises(ExportError, match=r"half precision|bfloat16, which ONNX Runtime's CPU does not run"):
        net.save(tmp_path / "net.safetensors", onnx=True, example_input=X.to(dtype))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 12, batch_first=True)

    def forward(self, x):
        return self.layer(pack_padded_sequence(x, torch.full((x.shape[0],), x.shape[1]), batch_first=True))[1][0]


def test_a_packed_batch_is_refused_in_one_line(tmp_path):
    net = dn.decompose(Packed().eval(), X)
    for export, file in (
        (dn.export_onnx, "net.onnx"),
        (dn.export_torch, "net.pt2"),
        (save_with_graph, "a.safetensors"),
    ):
        with pytest.raises(ExportError, match="PackedSequence") as caught:
            export(net, tmp_path / file)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / file).exists()
