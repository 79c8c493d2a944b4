"""Layers whose outputs go into batch normalisation and nowhere else."""

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.core.tracing import trace
from decomposable.network import descent


class Block(nn.Module):
    """A convolution, batch normalisation, and what else there is."""

    def __init__(self, more):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.other = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.head, self.more = nn.Linear(8, 4), more

    def forward(self, x):
        y = self.conv(x)
        return self.more(self, x, y, self.norm(y))


def pooled(block, y):
    return block.head(y.mean(dim=(2, 3)))


ALONE = {
    "nothing": lambda block, x, y, z: pooled(block, z.relu()),
    "its shape": lambda block, x, y, z: pooled(block, z * y.shape[1] / y.size(1) * y.dim()),
    "a second normalisation": lambda block, x, y, z: pooled(block, z + block.other(y)),
    "a second call, normalised too": lambda block, x, y, z: pooled(block, z + block.norm(block.conv(x))),
}
BESIDES = {
    "a shortcut": lambda block, x, y, z: pooled(block, z.relu() + y),
    "a shortcut by a view": lambda block, x, y, z: pooled(block, z.relu() + y.flatten(2).view_as(z)),
    "the network's output": lambda block, x, y, z: {"logits": pooled(block, z), "features": [y]},
    "a list of tensors": lambda block, x, y, z: pooled(block, torch.cat([z, y], dim=2)),
    "a second call": lambda block, x, y, z: pooled(block, z) + pooled(block, block.conv(2 * x)),
    "another layer": lambda block, x, y, z: pooled(block, z) + pooled(block, y),
}


@pytest.mark.parametrize("what", [*ALONE, *BESIDES])
def test_who_else_uses_an_output(what):
    block = Block((ALONE | BESIDES)[what]).eval()
    seen = trace(block, torch.randn(2, 3, 6, 6))
    assert seen.layer_before_norm[block.norm] is block.conv
    assert (block.conv in seen.only_normalised) == (what in ALONE)


@pytest.mark.parametrize("what", ["nothing", "a shortcut"])
def test_a_mean_that_somebody_else_uses_is_kept(what, monkeypatch):
    """The covariance alone would let a cut lose the mean of the shortcut."""
    centred = []
    original = descent.second_moments

    def noting(*args, **options):
        centred.append(options["centred"])
        return original(*args, **options)

    monkeypatch.setattr(descent, "second_moments", noting)
    block = Block((ALONE | BESIDES)[what]).eval()
    dn.decompose(block, data=list(torch.randn(40, 3, 6, 6).split(10)))
    assert {*map(frozenset, centred)} == {frozenset({"conv"} if what == "nothing" else ())}


def test_a_shortcut_keeps_its_mean_in_a_small_network(recwarn):
    """Inputs that are far from zero along one direction, which the shortcut hands on: a cut by the covariance drops it.

    Half of the bases are enough for the mean and the largest variances.
    """

    class Shortcut(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.head = nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.Linear(24, 5)

        def forward(self, x):
            y = self.first(x)
            return self.head(self.norm(y).relu() + y)

    torch.manual_seed(0)
    model = Shortcut().eval()
    directions = torch.linalg.qr(torch.randn(24, 24))[0]
    x = torch.randn(480, 24) * torch.linspace(1, 0.1, 24) @ directions + 4 * directions[-1]
    with torch.no_grad():
        y = model.first(x)
        model.norm.running_mean.copy_(y.mean(dim=0))
        model.norm.running_var.copy_(y.var(dim=0))
    net = dn.decompose(model, data=list(x.split(24)))
    rank = net.plan(macs=0.7).ranks["first"]
    net.resize_(macs=0.7)
    assert rank < 24
    p = net.extract().first
    with torch.no_grad():
        found, expected = p(x).mean(dim=0), model.first(x).mean(dim=0)
    assert (found - expected).norm() < 0.1 * expected.norm()
