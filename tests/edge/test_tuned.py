"""A device runs tuned sizes as PyTorch does."""

import copy

import numpy as np
import pytest
import torch
from sealing import seal, unseal
from torch import nn

import decomposable as dn
from decomposable_edge import AnySizeSession
from decomposable_edge.errors import ArtifactError

SIZES = (1.0, 0.8, 0.6, 0.45, 0.3, 0.22)


class Small(nn.Module):
    """Batch normalisation that can be folded and that cannot, and biases of zeros, which an exporter takes out."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(12)
        self.body = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.late_bn = nn.BatchNorm2d(16)
        self.hidden, self.head = nn.Linear(16, 24), nn.Linear(24, 5)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        x = torch.relu(self.stem_bn(self.stem(x)))
        x = self.late_bn(torch.relu(self.body(x)))
        return 3 * self.head(torch.relu(self.hidden(x.mean((2, 3)))))


@pytest.fixture(scope="module")
def tuned():
    torch.manual_seed(0)
    batches = [torch.randn(16, 3, 12, 12) for _ in range(3)]
    model = Small().train()
    for batch in batches:
        model(batch)
    net = dn.decompose(model.eval(), batches[0])
    net.tune_(batches, [0.6, 0.3], steps=10, learning_rate=0.02, passes=10)
    return net, batches[0]


@pytest.fixture(scope="module")
def bundle(tuned, tmp_path_factory):
    path = tmp_path_factory.mktemp("tuned") / "net.safetensors"
    tuned[0].save(path, onnx=True)
    return path


def same_at(net, path, x, sizes=SIZES):
    session, net = AnySizeSession(path), copy.deepcopy(net).eval()
    for size in sizes:
        net.resize_(macs=size)
        session.resize(macs=size, align=1)
        assert session.plan() == net.plan()
        np.testing.assert_allclose(session.run(x.numpy()), net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_a_bundle_gives_what_the_network_gives_at_every_size(tuned, bundle):
    net, x = tuned
    same_at(net, bundle, x)
    untuned = copy.deepcopy(net)
    untuned.resize_(macs=0.3)
    before = untuned(x)
    untuned._take(tuned=None)
    assert (untuned(x) - before).abs().max() > 0.01  # else nothing was tested


def test_a_part_of_the_network_too(tuned, tmp_path):
    net, x = tuned
    net.save(tmp_path / "net.safetensors")
    part = dn.load(tmp_path / "net.safetensors", model=Small(), macs=0.5)
    part.save(tmp_path / "part.safetensors", onnx=True)
    same_at(part, tmp_path / "part.safetensors", x, sizes=SIZES[3:])


def test_one_size_as_onnx(tuned, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    net, x = tuned
    net = copy.deepcopy(net)
    net.resize_(macs=0.45)
    dn.export_onnx(net, tmp_path / "size.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "size.onnx", providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


class Shared(nn.Module):
    """Kinds of vectors: a bias that two layers share, layer and group normalisation, one that only training uses."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.group = nn.GroupNorm(2, 8)
        self.a, self.b = nn.Linear(8, 12), nn.Linear(12, 12)
        self.b.bias = self.a.bias
        self.norm = nn.LayerNorm(12)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.only_training = nn.Linear(12, 5)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = torch.relu(self.group(self.conv(x))).flatten(2).mean(2)
        x = self.scale * self.norm(self.b(torch.relu(self.a(x))))
        return self.head(x) + (self.only_training(x) if self.training else 0)


@pytest.mark.slow
def test_all_kinds_of_vectors(tmp_path):
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 6, 6) for _ in range(3)]
    net = dn.decompose(Shared().eval(), batches[0])
    net.tune_(batches, [0.6, 0.4], steps=8, learning_rate=0.02)
    assert "scale" in net._tuned.names
    net.save(tmp_path / "net.safetensors", onnx=True)
    same_at(net, tmp_path / "net.safetensors", batches[0], sizes=(1.0, 0.6, 0.5, 0.4))


@pytest.mark.slow
def test_half_precision(tuned, tmp_path):
    net, x = tuned
    half = copy.deepcopy(net).half()
    half.save(tmp_path / "half.safetensors", onnx=True, example_input=x.half(), tolerance=0.05)
    session = AnySizeSession(tmp_path / "half.safetensors")
    net = copy.deepcopy(net)
    net.resize_(macs=0.45)
    session.resize(macs=0.45, align=1)
    np.testing.assert_allclose(session.run(x.half().numpy()), net(x).detach().numpy(), rtol=0.05, atol=0.05)


def _nan(description, arrays):
    arrays["tuned/values"] = arrays["tuned/values"].copy()
    arrays["tuned/values"][0, 0] = np.nan


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_nan, "tuned values are NaN or infinite"),
        (lambda d, a: a.pop("tuned/original"), "tensor 'tuned/original' is missing"),
        (lambda d, a: d["tuned"]["names"].__setitem__(0, "nothing"), "'nothing' is tuned, and no vector"),
        (lambda d, a: d["tuned"]["names"].remove("late_bn.bias"), "tensor 'tuned/values' is"),
        (lambda d, a: a.update({"tuned/positions": a["tuned/positions"][::-1].copy()}), "not in order"),
        (lambda d, a: d.update(tuned=None), "belongs to nothing"),
    ],
)
def test_damaged_entries_are_refused(bundle, tmp_path, spoil, message):
    model, description, arrays = unseal(bundle)
    spoil(description, arrays)
    path = tmp_path / "spoilt.safetensors"
    path.write_bytes(seal(model, description, arrays))
    with pytest.raises(ArtifactError, match=message):
        AnySizeSession(path)
