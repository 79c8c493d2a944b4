"""Spectra, the bound of proposition 2, Lipschitz constants and gradient norms, each computed in another way."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
import decomposable_lab as lab
from decomposable.core.forms import to_matrix
from decomposable_edge.errors import InvalidArgumentError


def fully_connected(seed=0, activation=nn.ReLU):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(12, 16), activation(), nn.Linear(16, 10), activation(), nn.Linear(10, 4)
    )


def convolutional(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 10, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(90, 4),
    )


X = torch.randn(20, 3, 2, 2, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(12, 3, 7, 7, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_singular_values_are_those_of_lapack(form):
    model = convolutional()
    found = lab.analysis.singular_values(model, form=form)
    assert list(found) == ["0", "2", "5"]
    for name, values in found.items():
        layer = model.get_submodule(name)
        kind = form if layer.weight.dim() == 4 else "channel"
        wanted = torch.linalg.svdvals(to_matrix(layer.weight.detach(), kind))
        assert values == pytest.approx(wanted.numpy(), rel=1e-5)


def test_criteria_select_the_plans_that_networks_take():
    model = convolutional()
    plans = lab.analysis.selected_ranks(model, IMAGES[:1], macs=0.4)
    assert list(plans) == ["uniform", "energy", "singular_value"]
    for criterion, plan in plans.items():
        assert plan == dn.decompose(model, IMAGES[:1], criterion=criterion).resize_(macs=0.4)


@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.9])
def test_the_bound_holds_and_is_what_the_proposition_says(ratio):
    model = fully_connected()
    net = dn.decompose(model, X[:1])
    net.resize_(ratio=ratio)
    found = lab.analysis.divergence(net, [X[:9], X[9:]])
    assert found.holds
    assert 0 < found.tightness < 1
    p, q = (F.softmax(each(X).double(), dim=1) for each in (model, net))
    assert found.kl == pytest.approx((p * (p.log() - q.log())).sum(1).detach().numpy(), rel=1e-4, abs=1e-9)
    small, x, total, layers = net.extract(), X.flatten(1), 0.0, [1, 3, 5]
    with torch.no_grad():
        for place, name in enumerate(layers):
            y, other = model[name](x), small[name](x)
            norms = [float(torch.linalg.matrix_norm(model[later].weight, ord=2)) for later in layers[place + 1 :]]
            total = total + (y - other).square().sum(1) * math.prod(norms) ** 2
            x = y.relu()
    assert found.bound == pytest.approx((2 * total).sqrt().numpy(), rel=1e-4)


def test_batches_of_a_loader_with_labels_are_taken_by_their_first_entry():
    net = dn.decompose(fully_connected(), X[:1])
    net.resize_(ratio=0.4)
    labelled = [(X, torch.zeros(len(X), dtype=torch.long))]
    assert np.array_equal(lab.analysis.divergence(net, labelled).kl, lab.analysis.divergence(net, [X]).kl)
    found, same = lab.analysis.lipschitz(net, labelled), lab.analysis.lipschitz(net, [X])
    assert np.array_equal(found.empirical, same.empirical, equal_nan=True)


class Louder(nn.Module):
    def forward(self, x):
        return 3 * x


def test_networks_that_the_proposition_does_not_speak_of_are_refused():
    cases = [
        (convolutional(), IMAGES, "layer '0': a Conv2d; allowed: fully connected"),
        (
            nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
            torch.randn(4, 6),
            "'1.weight': not of a linear",
        ),
        (fully_connected(activation=Louder), X, "between '1' and '3': errors grow"),
    ]
    for model, x, message in cases:
        net = dn.decompose(model.eval(), x[:1])
        net.resize_(ratio=0.3)
        with pytest.raises(InvalidArgumentError, match=message):
            lab.analysis.divergence(net, [x])


def test_lipschitz_constants_are_the_largest_quotients_and_below_theory():
    model = convolutional()
    net = dn.decompose(model, IMAGES[:1])
    net.resize_(ratio=0.4)
    found = lab.analysis.lipschitz(net, [IMAGES[:5], IMAGES[5:]])
    small = net.extract()
    assert found.names == ("0", "2", "5")
    assert math.isnan(found.empirical[0])
    assert (found.empirical[1:] <= found.theoretical[1:]).all()
    with torch.no_grad():
        y, other = model[0](IMAGES), small[0](IMAGES)
        moved = small[2](y.relu()) - small[2](other.relu())
        quotients = moved.flatten(1).norm(dim=1) / (y - other).flatten(1).norm(dim=1)
    assert found.empirical[1] == pytest.approx(float(quotients.max()), rel=1e-4)
    matrix = to_matrix(model[2].weight.detach(), "spatial")
    assert found.theoretical[1] == pytest.approx(2 * float(torch.linalg.matrix_norm(matrix, ord=2)), rel=1e-5)
    assert found.theoretical_products == pytest.approx(
        [found.theoretical[1] * found.theoretical[2], found.theoretical[2]]
    )
    assert found.empirical_products.shape == (2,)


def test_the_theoretical_constant_is_above_the_operators_norm():
    """Of the convolution as a matrix, column by column."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.Conv2d(3, 4, 3, stride=2, bias=False))
    net = dn.decompose(model, torch.zeros(1, 2, 6, 6))
    net.resize_(ratio=0.5)
    found = lab.analysis.lipschitz(net, [torch.randn(3, 2, 6, 6)])
    for place, (layer, shape) in enumerate(zip(model, [(2, 6, 6), (3, 6, 6)], strict=True)):
        columns = torch.eye(math.prod(shape)).reshape(-1, *shape)
        operator = torch.linalg.matrix_norm(layer(columns).detach().flatten(1), ord=2)
        assert float(operator) <= found.theoretical[place]


def test_there_is_no_error_at_full_size_and_no_layer_may_run_twice():
    net = dn.decompose(fully_connected(), X[:1])
    with pytest.raises(InvalidArgumentError, match="allowed: a smaller one"):
        lab.analysis.lipschitz(net, [X])
    twice = nn.Linear(6, 6)
    net = dn.decompose(nn.Sequential(twice, nn.ReLU(), twice), torch.zeros(1, 6))
    net.resize_(ratio=0.5)
    with pytest.raises(InvalidArgumentError, match="it runs twice in one pass"):
        lab.analysis.lipschitz(net, [torch.randn(4, 6)])


def test_gradient_norms_are_those_of_both_networks():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    x, y = torch.randn(16, 8, dtype=torch.float64), torch.arange(16) % 4
    with torch.no_grad():  # singular values far apart: nothing is clipped
        for layer in (model[0], model[2]):
            u, s, vt = torch.linalg.svd(layer.weight, full_matrices=False)
            layer.weight.copy_((u * 0.5 ** torch.arange(len(s))) @ vt)
    joint = dn.JointObjective(model, ratio=0.6, seed=0)
    found = lab.analysis.gradient_norms(joint, lambda net: F.cross_entropy(net(x), y))
    assert all(p.grad is None for p in model.parameters())
    ranks = joint.select_ranks(joint._bases.of_current_weights(), 0.6)
    full = torch.autograd.grad(F.cross_entropy(model(x), y), [model[0].weight, model[2].weight])
    hidden, weights = x, []
    for place in (0, 2):
        layer = model[place]
        u, s, vt = torch.linalg.svd(layer.weight, full_matrices=False)  # torch's own gradient goes through this
        rank = ranks[str(place)]
        hidden = F.linear(hidden, (u[:, :rank] * s[:rank]) @ vt[:rank], layer.bias)
        hidden = hidden.tanh() if place == 0 else hidden
        weights.append(layer.weight)
    low = torch.autograd.grad(F.cross_entropy(hidden, y), weights)
    assert np.array([found["0"], found["2"]]) == pytest.approx(
        np.array([[float(f.norm()), float(g.norm())] for f, g in zip(full, low, strict=True)]), rel=1e-6
    )
