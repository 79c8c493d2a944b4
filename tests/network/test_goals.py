"""What a cut must not lose: which goal fits a network, and that gradients and distances are of the same thing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decomposable.core.distillation import kl_divergence
from decomposable.network.goals import (
    LOSS,
    OUTPUT,
    divergences,
    goal_for,
    is_certain,
    logits_in,
    projected_loss,
    squared_distances,
    values_in,
)
from refusals import Saying, refused

GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize(
    ("outputs", "goal"),
    [
        (normal(8, 5), LOSS),
        (normal(8, 5).softmax(1), LOSS),
        ({"logits": normal(8, 3, 5)}, LOSS),
        ({"logits": normal(8, 5).relu()}, LOSS),  # whoever calls them logits knows it
        (F.normalize(normal(8, 5), dim=1), OUTPUT),
        (normal(8, 5).relu(), OUTPUT),
        (normal(8, 1), OUTPUT),
        (normal(8, 4, 6, 6), OUTPUT),
        ((normal(8, 4, 6), normal(8, 2)), OUTPUT),
        ({"last_hidden_state": normal(8, 4, 6)}, OUTPUT),
    ],
)
def test_what_a_network_gives_says_which_goal_fits(outputs, goal):
    assert goal_for(None, outputs) is goal


def test_a_criterion_is_taken_as_it_is():
    assert goal_for("output", normal(8, 5)) is OUTPUT
    assert goal_for("loss", normal(8, 5).relu()) is LOSS


def test_probabilities_are_as_good_as_logits():
    logits = normal(6, 4)
    torch.testing.assert_close(logits_in(logits.softmax(1)).softmax(1), logits.softmax(1))
    zero = torch.tensor([[1.0, 0.0]])
    assert logits_in(zero).isfinite().all()


def test_divergences_have_the_mean_that_distillation_goes_by():
    low, full = normal(7, 5), normal(7, 5)
    torch.testing.assert_close(divergences((low,), (full,)).mean(), kl_divergence(low, full))


def test_the_moment_of_projected_gradients_is_that_of_the_squared_distance():
    """Over many draws Jᵀε εᵀJ becomes JᵀJ, which is half the second derivative of ‖f(y) − f(y₀)‖²."""
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    y = torch.randn(4, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(f, y)
    scale = f(y).detach().square().mean()
    rows = y.repeat(5000, 1).requires_grad_(True)
    projected_loss(f(rows), 0).backward()
    found = rows.grad.T @ rows.grad / len(rows)
    wanted = jacobian.T @ jacobian / scale
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.05 * float(wanted.max()))
    hessian = torch.autograd.functional.hessian(lambda z: (f(z) - f(y)).square().sum(), y)
    torch.testing.assert_close(hessian / 2, jacobian.T @ jacobian, rtol=1e-6, atol=1e-9)


def test_signs_are_the_same_in_every_pass_and_others_in_every_batch():
    outputs = normal(8, 5)
    assert projected_loss(outputs, 1) == projected_loss(outputs, 1)
    assert projected_loss(outputs, 1) != projected_loss(outputs, 2)


def test_squared_distances_are_relative_and_several_outputs_count_alike():
    full = (normal(4, 6), 100 * normal(4, 2))
    low = tuple(each * 1.1 for each in full)
    found = squared_distances(low, full)
    assert float(found.mean()) == pytest.approx(0.01, rel=1e-4)
    alone = squared_distances((low[0], full[1]), full)
    assert float(alone.mean()) == pytest.approx(0.005, rel=1e-4)


def test_outputs_without_numbers_are_refused():
    with refused("criterion", "dict", Saying("several in a tuple, a list or a mapping")):
        values_in({"boxes": torch.zeros(3, dtype=torch.int64)})


def test_who_is_certain():
    assert is_certain(torch.tensor([[1e4, 0.0], [0.0, 2e3]]))
    assert not is_certain(torch.tensor([[1e4, 0.0], [0.0, 2.0]]))
