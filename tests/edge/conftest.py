"""A small calibrated network, its file, and what the tests of devices share."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import decomposable as dn

sys.path.insert(0, str(Path(__file__).parent))  # for what the tests share
from sealing import seal, tiny_model

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


class Small(nn.Module):
    """A few layers of each kind: factors in both forms, batch normalisation that can be folded and that cannot."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.stem_bn = nn.BatchNorm2d(12)
        self.body = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.early_bn = nn.BatchNorm2d(16)
        self.point = nn.Conv2d(16, 16, 1, bias=False)
        self.point_bn = nn.BatchNorm2d(16)
        self.hidden = nn.Linear(16, 24)
        self.hidden_bn = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 5)

    def forward(self, x):
        x = torch.relu(self.stem_bn(self.stem(x)))
        x = self.body(x)
        x = x + self.point_bn(self.point(torch.relu(self.early_bn(x))))  # early_bn: what it takes is used twice
        x = torch.relu(self.hidden_bn(self.hidden(x.mean((2, 3)))))
        return self.head(x)


def randomised(model):
    """Batch normalisation as after training: means of 0 and scales of 1 would hide mistakes."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            size = module.num_features
            module.running_mean.copy_(0.3 * torch.randn(size, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(size, generator=generator))
            if module.affine:
                module.weight.data.copy_(0.5 + torch.rand(size, generator=generator))
                module.bias.data.copy_(0.3 * torch.randn(size, generator=generator))
    return model


@pytest.fixture(scope="session")
def net():
    torch.manual_seed(0)
    example = torch.randn(16, 3, 12, 12)
    net = dn.decompose(randomised(Small()).eval(), example)
    net.calibrate_([example], passes=20)
    return net


@pytest.fixture(scope="session")
def bundle(net, tmp_path_factory) -> Path:
    """The network's file; not to be changed."""
    from decomposable.export.any_size import save_with_graph

    path = tmp_path_factory.mktemp("bundle") / "small.safetensors"
    save_with_graph(net, path)
    return path


@pytest.fixture(scope="session")
def x():
    return torch.randn(7, 3, 12, 12, generator=torch.Generator().manual_seed(2)).numpy()


@pytest.fixture(scope="session")
def expected(net, x):
    """The network in PyTorch at a size."""

    def run(**size):
        net.resize_(**size)
        with torch.no_grad():
            return net(torch.from_numpy(x)).numpy()

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The file of `tiny_model`; not to be changed."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.safetensors"
    path.write_bytes(seal(*tiny_model()))
    return path


@pytest.fixture(scope="session")
def tiny_parts():
    return tiny_model
