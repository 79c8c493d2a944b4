"""How far moments are believed: against scikit-learn, and the errors of estimates that are drawn anew."""

import math

import pytest
import torch
from torch import nn

from decomposable.core.layers import find_layers
from decomposable.core.moments import second_moments
from decomposable.core.sums import Moments, of_weights, shrunk, shrunk_moment


def moments_of(x, *, batch, centred=()):
    """A of a layer that sees these rows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(x.shape[1], 3))
    layers, _ = find_layers(model, "channel")
    [found] = second_moments(model, layers, x.split(batch), lambda net, rows: net(rows), centred=centred)
    return found["0"]


def correlated(rows, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(99)) * torch.linspace(0.1, 2, width)
    return torch.randn(rows, width, generator=generator) @ mixing


@pytest.mark.parametrize(("rows", "width"), [(200, 10), (60, 40), (30, 80)])
def test_the_mixture_is_that_of_ledoit_and_wolf(rows, width):
    """Of rows that are independent, one to a batch. Theirs has 1/n where ours has the unbiased 1/(n − 1)."""
    covariance = pytest.importorskip("sklearn.covariance", reason="the extra demo is not installed")
    x = correlated(rows, width)
    found = moments_of(x, batch=1)
    believed = shrunk_moment(found.inputs, found.errors[0])
    _, share = covariance.ledoit_wolf(x.double().numpy(), assume_centered=True)
    assert 0.01 < share < 0.99
    share *= rows / (rows - 1)
    mean = found.inputs.diagonal().mean()
    torch.testing.assert_close(
        believed, (1 - share) * found.inputs + share * mean * torch.eye(width), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("batch", [1, 5, 25])
def test_the_error_is_what_estimates_from_other_images_show(batch):
    """‖S − Σ‖², measured over many draws of a hundred rows, whatever the batches are."""
    width, rows = 6, 100
    truth = moments_of(correlated(200_000, width, seed=1), batch=50_000).inputs
    told, real = [], []
    for seed in range(40):
        found = moments_of(correlated(rows, width, seed=seed + 2), batch=batch)
        told.append(found.errors[0])
        real.append(float((found.inputs - truth).square().sum()))
    assert sum(told) == pytest.approx(sum(real), rel=0.35)


def test_positions_of_one_image_are_not_independent():
    """A hundred equal rows in every batch say as much as one."""
    x = correlated(30, 5)
    alone = moments_of(x, batch=1)
    repeated = moments_of(x.repeat_interleave(100, dim=0), batch=100)
    torch.testing.assert_close(alone.inputs, repeated.inputs)
    assert repeated.errors[0] == pytest.approx(alone.errors[0], rel=1e-3)


def test_what_one_batch_says_is_not_believed():
    found = moments_of(correlated(50, 4), batch=50)
    assert math.isinf(found.errors[0])
    believed = shrunk(found).inputs
    torch.testing.assert_close(believed, believed.diagonal().mean() * torch.eye(4))


def test_many_images_are_believed():
    found = moments_of(correlated(20_000, 4), batch=100)
    torch.testing.assert_close(shrunk(found).inputs, found.inputs, rtol=0.02, atol=0.02)


def test_both_sides_are_shrunk_each_by_its_own_error():
    a, g = torch.diag(torch.tensor([4.0, 0.0])), torch.diag(torch.tensor([2.0, 0.0]))
    believed = shrunk(Moments(a, g, errors=(0.0, math.inf)))
    assert torch.equal(believed.inputs, a)
    assert torch.equal(believed.gradients, torch.eye(2))


def test_moments_of_weights_alone_know_no_direction():
    found = of_weights(Moments(torch.diag(torch.tensor([4.0, 2.0])), torch.diag(torch.tensor([1.0, 0.0]))))
    assert torch.equal(found.inputs, 3 * torch.eye(2))
    assert torch.equal(found.gradients, 0.5 * torch.eye(2))
    assert of_weights(Moments(torch.eye(3))).gradients is None


def test_of_zeros_nothing_is_made():
    assert torch.equal(shrunk_moment(torch.zeros(3, 3), 0.0), torch.zeros(3, 3))


def test_centred_is_the_covariance_inside_the_batches():
    """Batch normalisation takes each batch's mean away."""
    x = correlated(60, 5) + 7
    found = moments_of(x, batch=20, centred={"0"}).inputs
    inside = torch.stack([torch.cov(part.mT, correction=0) for part in x.split(20)]).mean(dim=0)
    torch.testing.assert_close(found, inside, rtol=1e-4, atol=1e-4)
