import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from decomposable import decompose
from decomposable.core.factors import Taylor
from decomposable.core.forms import to_matrix, to_weight
from decomposable.core.layers import find_layers
from decomposable.core.svd import svd
from refusals import refused

few = settings(max_examples=6, deadline=None, derandomize=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def network():
    """A small float64 network with a convolution, dropout, batch normalisation and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Dropout(0.5),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).double()


def data(batches=3):
    return [(torch.randn(6, 2, 4, 4).double(), torch.randint(0, 5, (6,))) for _ in range(batches)]


def loss(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def scores_of(model, criterion, form="spatial"):
    layers, _ = find_layers(model, form)
    decompositions = svd({layer.name: to_matrix(layer.weight.detach(), layer.form) for layer in layers})
    scores = criterion.scores(model, layers, decompositions)
    return layers, decompositions, {name: of_cut for name, (of_cut,) in scores.items()}


@torch.no_grad()
def finite_difference(model, layer, decomposition, basis, batch, step=1e-5):
    """∂L/∂σ of one basis: the loss with W a little more and a little less of u vᵀ."""
    u, _, v = decomposition
    direction = to_weight(torch.outer(u[:, basis], v[:, basis]), layer.shape, layer.form)
    losses = []
    for sign in (1, -1):
        layer.weight.add_(sign * step * direction)
        losses.append(loss(model.eval(), batch))
        layer.weight.sub_(sign * step * direction)
    return (losses[0] - losses[1]) / (2 * step)


@few
@given(form=st.sampled_from(["spatial", "channel"]), batches=st.integers(1, 3), seed=st.integers(0, 99))
def test_scores_are_sigma_times_the_loss_gradient_by_finite_differences(form, batches, seed):
    torch.manual_seed(seed)
    model, loader = network(), data(batches)
    layers, decompositions, scores = scores_of(model, Taylor(loader, loss), form)
    for layer in layers:
        sigma = decompositions[layer.name].s
        for basis in {0, 1, len(sigma) - 1}:
            slopes = [finite_difference(model, layer, decompositions[layer.name], basis, batch) for batch in loader]
            expected = sigma[basis] * torch.stack(slopes).abs().mean()
            np.testing.assert_allclose(scores[layer.name][basis], expected, rtol=1e-4, atol=1e-8)


def test_magnitudes_are_averaged_batch_by_batch_so_that_opposite_gradients_do_not_cancel():
    model = nn.Linear(3, 3).double()
    x = torch.randn(4, 3).double()
    both = Taylor([1.0, -1.0], lambda net, sign: sign * net(x).sum())
    one = Taylor([1.0], lambda net, sign: sign * net(x).sum())
    np.testing.assert_allclose(scores_of(model, both)[2][""], scores_of(model, one)[2][""])


def test_a_layer_that_the_loss_does_not_reach_scores_zero():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "unused": nn.Linear(4, 4)}).double()
    criterion = Taylor([torch.randn(3, 4).double()], lambda net, x: net["used"](x).square().sum())
    scores = scores_of(model, criterion)[2]
    assert scores["used"].min() > 0
    assert not scores["unused"].any()


def test_frozen_weights_have_scores_too():
    model, loader = network(), data()
    expected = scores_of(model, Taylor(loader, loss))[2]
    scores = scores_of(model.requires_grad_(False), Taylor(loader, loss))[2]
    for name in expected:
        np.testing.assert_allclose(scores[name], expected[name])


def test_gradients_are_computed_under_no_grad_too():
    model, loader = network(), data()
    expected = scores_of(model, Taylor(loader, loss))[2]
    with torch.no_grad():
        scores = scores_of(model, Taylor(loader, loss))[2]
    for name in expected:
        np.testing.assert_allclose(scores[name], expected[name])


@pytest.mark.parametrize("as_generator", [True, False])
def test_only_the_first_batches_are_used(as_generator):
    model, loader = network(), data(5)
    expected = scores_of(model, Taylor(loader[:2], loss))[2]
    seen = []

    def counted(net, batch):
        seen.append(1)
        return loss(net, batch)

    batches = (batch for batch in loader) if as_generator else loader
    scores = scores_of(model, Taylor(batches, counted, max_batches=2))[2]
    assert len(seen) == 2
    for name in expected:
        np.testing.assert_allclose(scores[name], expected[name])


# The model stays as it is


def test_flags_statistics_and_gradients_are_as_before():
    model = network().train()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    flags = [module.training for module in model.modules()]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    scores_of(model, Taylor(data(), loss))
    assert [module.training for module in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True, True, True]
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_flags_are_as_before_where_the_loss_fails():
    model = network().train().requires_grad_(False)

    def fails(net, batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        scores_of(model, Taylor(data(), fails))
    assert all(module.training for module in model.modules())
    assert not any(p.requires_grad for p in model.parameters())


def test_decompose_leaves_the_model_and_its_flags_alone():
    model = network().train()
    model[0].weight.requires_grad_(False)
    net = decompose(model, criterion=Taylor(data(), loss))
    assert all(module.training for module in model.modules())
    assert not any(module.training for module in net.modules())
    assert not model[0].weight.requires_grad
    assert not net.extract()[0].weight.requires_grad
    assert net.extract()[5].weight.requires_grad


# What is refused


def test_an_empty_loader_is_refused():
    with refused("criterion", 0, "at least one batch"):
        decompose(network(), criterion=Taylor([], loss))


def test_a_loss_that_is_not_finite_is_refused_and_a_layer_named():
    criterion = Taylor(data(), lambda net, batch: loss(net, batch) * float("nan"))
    with refused("criterion", allowed="a loss with finite gradients", layer="0"):
        decompose(network(), criterion=criterion)


# Sizes


def kept_terms(model, name, scores, rank, form):
    """The sum of the `rank` best-scored rank-1 terms of a layer."""
    weight = model.get_submodule(name).weight.detach()
    form = form if weight.dim() == 4 else "channel"
    u, s, v = svd({name: to_matrix(weight, form)})[name]
    best = np.argsort(-scores[name])[:rank].copy()
    return to_weight((u[:, best] * s[best]) @ v[:, best].mT, weight.shape, form)


def dense_weight(layer):
    if not isinstance(layer, nn.Sequential):
        return layer.weight
    first, second = (part.weight for part in layer)
    if first.dim() == 2:
        return second @ first
    both = torch.einsum("orac,ribd->oiabcd", second, first)
    o, i, h2, h1, w2, w1 = both.shape
    return both.reshape(o, i, h2 * h1, w2 * w1)


@pytest.mark.parametrize("form", ["spatial", "channel"])
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_a_size_keeps_the_best_scored_bases(form, ratio):
    model, loader = network(), data()
    scores = scores_of(model, Taylor(loader, loss), form)[2]
    net = decompose(model, loader[0], form=form, criterion=Taylor(loader, loss))
    with pytest.warns(UserWarning, match="calibrate_"):
        plan = net.resize_(ratio=ratio)
    for name, rank in plan.ranks.items():
        expected = kept_terms(model, name, scores, rank, form)
        torch.testing.assert_close(dense_weight(net.module.get_submodule(name)), expected, atol=1e-9, rtol=0)


def test_the_order_differs_from_that_of_the_singular_values():
    """Otherwise the test above would test nothing."""
    scores = scores_of(network(), Taylor(data(), loss))[2]
    assert any((np.diff(values) > 0).any() for values in scores.values())


def test_ranks_follow_the_scores_of_all_layers_together():
    model, loader = network(), data()
    scores = scores_of(model, Taylor(loader, loss))[2]
    net = decompose(model, loader[0], criterion=Taylor(loader, loss))
    with pytest.warns(UserWarning, match="calibrate_"):
        plan = net.resize_(ratio=0.5)
    every = np.sort(np.concatenate(list(scores.values())))[::-1]
    threshold = every[round(0.5 * len(every)) - 1]
    assert plan.ranks == {name: max(1, int((values >= threshold).sum())) for name, values in scores.items()}


def test_full_size_computes_what_the_model_does():
    model, loader = network().eval(), data()
    net = decompose(model, loader[0], criterion=Taylor(loader, loss))
    torch.testing.assert_close(net(loader[0][0]), model(loader[0][0]))


def test_a_basis_that_the_loss_depends_on_is_kept_before_a_larger_one():
    model = nn.Linear(2, 2, bias=False)
    model.weight.data = torch.diag(torch.tensor([5.0, 1.0]))
    criterion = Taylor([torch.eye(2)], lambda net, x: net(x)[:, 1].sum())
    net = decompose(model, criterion=criterion)
    net.resize_(ranks={"": 1})
    expected = torch.diag(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(dense_weight(net.module), expected)
