from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, kl_divergence

import decomposable as dn
from decomposable.elastic import ElasticOptions
from decomposable_edge.errors import InvalidArgumentError

X = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def forward(net: nn.Module) -> torch.Tensor:
    return net(X)


def loss(out: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, Y)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in net.parameters()]


def elastic(net: nn.Module, macs: float = 0.6, distance: object = None, **options: object) -> dn.Elastic:
    """Both networks in each step."""
    chosen = ElasticOptions(macs=(macs, macs), **{"low_steps_per_full": 0, "distill": 1.0, **options})  # type: ignore[arg-type]
    return dn.Elastic(net, example_input=X, steps=100, seed=0, options=chosen, distance=distance)  # type: ignore[arg-type]


@pytest.mark.parametrize("distill", [0.3, 1.0])
def test_the_loss_is_the_mixture(distill: float) -> None:
    seen = []

    def watched(net: nn.Module) -> torch.Tensor:
        seen.append(net(X))
        return seen[-1]

    net = model()
    losses = elastic(net, distill=distill).backward(forward=watched, loss=loss)
    full, low = (out.detach() for out in seen)
    kl = kl_divergence(Categorical(logits=full), Categorical(logits=low)).mean()
    assert torch.allclose(losses.full, loss(full))
    assert torch.allclose(losses.low, (1 - distill) * loss(low) + distill * kl)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """λ = 1 leaves the low-rank gradient alone, scaled to the norm of the full one."""
    net = model()
    joint = elastic(net, balance=1.0)
    joint.backward(forward=forward, loss=loss)
    taught = net(X).detach()

    def low_loss() -> float:
        fresh = dn.decompose(net, X)
        fresh.resize_(macs=0.6, align=1)
        return float(kl_divergence(Categorical(logits=taught), Categorical(logits=fresh(X))).mean())

    weight, got = net[0].weight, net[0].weight.grad
    direction = torch.randn_like(weight, generator=torch.Generator().manual_seed(2))
    step = 1e-5
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * step * direction
            ends.append(low_loss())
            weight -= sign * step * direction
    slope = (ends[0] - ends[1]) / (2 * step)
    full = torch.autograd.grad(loss(net(X)), weight)[0]
    # The norm of the gradient before it was scaled is found from a direction along it.
    unit = got / got.norm()
    with torch.no_grad():
        weight += step * unit
        up = low_loss()
        weight -= 2 * step * unit
        down = low_loss()
        weight += step * unit
    own_norm = (up - down) / (2 * step)
    assert torch.allclose(got.norm(), full.norm(), rtol=1e-6)
    assert abs(slope - float((unit * direction).sum()) * own_norm) < 1e-4 * own_norm * float(direction.norm())


@pytest.mark.parametrize("low_steps", [0, 1])
def test_at_full_rank_there_is_nothing_to_learn_from_the_teacher_and_the_labels_teach(low_steps: int) -> None:
    """The divergence of a network from itself has a gradient of rounding errors, which must not be scaled up."""
    net = model()
    joint = elastic(net, macs=1.0, low_steps_per_full=low_steps)
    for _ in range(1 + low_steps):
        net.zero_grad()
        losses = joint.backward(forward=forward, loss=loss)
    got = gradients(net)
    net.zero_grad()
    wanted = loss(net(X))
    wanted.backward()
    assert torch.allclose(losses.low, wanted)
    for one, other in zip(got, gradients(net), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_the_teacher_gets_no_gradient_from_the_distance() -> None:
    def distance(low: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        assert not full.requires_grad
        assert low.requires_grad
        return F.mse_loss(low, full)

    net = model()
    losses = elastic(net, distance=distance).backward(forward=forward, loss=loss)
    assert losses.low > 0


def test_outputs_that_are_objects_are_detached_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(x), note="kept")

    net = Model()
    losses = elastic(net).backward(forward=lambda n: n(X), loss=lambda out: loss(out.logits))
    assert losses.low > 0
    assert net.inner[0].weight.grad is not None


def test_a_distance_has_to_be_one() -> None:
    with pytest.raises(InvalidArgumentError, match="distance='mse'; allowed: a function"):
        elastic(model(), distance="mse")
    with pytest.raises(InvalidArgumentError, match="distance: nothing is distilled; allowed: with distill= above 0"):
        elastic(model(), distill=0.0, distance=F.mse_loss)
    joint = elastic(model(), distance=lambda low, full: low - full)
    with pytest.raises(InvalidArgumentError, match=r"distance: it returned shape \(6, 3\); allowed: a loss"):
        joint.backward(forward=forward, loss=loss)
