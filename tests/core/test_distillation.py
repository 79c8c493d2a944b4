from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, kl_divergence

import decomposable as dn
from decomposable.core import distillation
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


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_kl_is_that_of_torch_distributions(shape: tuple[int, ...]) -> None:
    low, full = torch.randn(shape), torch.randn(shape)
    wanted = kl_divergence(Categorical(logits=full), Categorical(logits=low)).mean()
    assert torch.allclose(distillation.kl_divergence(SimpleNamespace(logits=low), SimpleNamespace(logits=full)), wanted)
    assert torch.allclose(distillation.kl_divergence({"logits": low}, {"logits": full}), wanted)


@pytest.mark.parametrize("distill", [0.3, 1.0])
def test_the_loss_is_the_mixture(distill: float) -> None:
    seen = []

    def watched(net: nn.Module) -> torch.Tensor:
        seen.append(net(X))
        return seen[-1]

    net = model()
    losses = dn.JointObjective(net, ratio=0.5, distill=distill, seed=0).backward(forward=watched, loss=loss)
    full, low = (out.detach() for out in seen)
    kl = kl_divergence(Categorical(logits=full), Categorical(logits=low)).mean()
    assert torch.allclose(losses.full, loss(full))
    assert torch.allclose(losses.low, (1 - distill) * loss(low) + distill * kl)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """λ = 1 leaves the low-rank gradient alone, scaled to the norm of the full one."""
    net = model()
    joint = dn.JointObjective(net, ratio=0.5, distill=1.0, balance=1.0, seed=0)
    joint.backward(forward=forward, loss=loss)
    taught = net(X).detach()

    def low_loss() -> float:
        fresh = dn.decompose(net, X)
        fresh.resize_(ratio=0.5)
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


@pytest.mark.parametrize("turns", [False, True])
def test_at_full_rank_there_is_nothing_to_learn_from_the_teacher_and_the_labels_teach(turns: bool) -> None:
    """The divergence of a network from itself has a gradient of rounding errors, which must not be scaled up."""
    net = model()
    joint = dn.JointObjective(net, ratio=1.0, distill=1.0, turns=turns, seed=0)
    for _ in range(1 + turns):
        net.zero_grad()
        losses = joint.backward(forward=forward, loss=loss)
    got = gradients(net)
    net.zero_grad()
    wanted = loss(net(X))
    wanted.backward()
    assert torch.allclose(losses.low, wanted)
    for one, other in zip(got, gradients(net), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_classes_that_the_teacher_excludes_add_nothing() -> None:
    """A logit of −∞, as a mask has it: the divergence is that of the other classes, and so is its gradient."""
    low, full = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    found = []
    for masked in (True, False):
        leaf = low.clone().requires_grad_(True)
        mask = torch.tensor([False, False, True, False])
        one, other = (t.masked_fill(mask, -torch.inf) if masked else t[:, ~mask] for t in (leaf, full))
        divergence = distillation.kl_divergence(one, other)
        divergence.backward()
        found.append((divergence.detach(), leaf.grad))
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other)


def test_the_teacher_gets_no_gradient_from_the_distance() -> None:
    def distance(low: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        assert not full.requires_grad
        assert low.requires_grad
        return F.mse_loss(low, full)

    net = model()
    losses = dn.JointObjective(net, ratio=0.3, distill=1.0, distance=distance, seed=0).backward(
        forward=forward, loss=loss
    )
    assert losses.low > 0


def test_outputs_that_are_objects_are_detached_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(x), note="kept")

    net = Model()
    losses = dn.JointObjective(net, ratio=0.3, distill=1.0, seed=0).backward(
        forward=lambda n: n(X), loss=lambda out: loss(out.logits)
    )
    assert losses.low > 0
    assert net.inner[0].weight.grad is not None


def test_a_distance_has_to_be_one() -> None:
    with pytest.raises(InvalidArgumentError, match="distance='mse'; allowed: a function"):
        dn.JointObjective(model(), distill=1.0, distance="mse")
    with pytest.raises(InvalidArgumentError, match="distance: nothing is distilled; allowed: with distill= above 0"):
        dn.JointObjective(model(), distance=F.mse_loss)
    joint = dn.JointObjective(model(), distill=1.0, distance=lambda low, full: low - full, seed=0)
    with pytest.raises(InvalidArgumentError, match=r"distance: it returned shape \(6, 3\); allowed: a loss"):
        joint.backward(forward=forward, loss=loss)


def test_forward_and_loss_without_distill_are_the_closure() -> None:
    found = []
    for call in ({"closure": lambda net: loss(net(X))}, {"forward": forward, "loss": loss}):
        net = model()
        dn.JointObjective(net, ratio=0.3, seed=0).backward(**call)
        found.append(gradients(net))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_calls_that_cannot_be_are_refused() -> None:
    joint = dn.JointObjective(model(), distill=0.5, seed=0)
    with pytest.raises(
        InvalidArgumentError,
        match=r"distill=0.5 needs the outputs, which a closure does not show; allowed: backward\(forward=",
    ):
        joint.backward(lambda net: loss(net(X)))
    for call in ({}, {"forward": forward}, {"loss": loss}, {"closure": forward, "forward": forward, "loss": loss}):
        with pytest.raises(InvalidArgumentError, match="allowed: a closure, or both forward= and loss="):
            joint.backward(**call)
    with pytest.raises(InvalidArgumentError, match=r"distill=1.5; allowed: a number from 0 to 1"):
        dn.JointObjective(model(), distill=1.5)


@pytest.mark.parametrize(
    "outputs",
    [torch.zeros(2, 3, 4), torch.zeros(3), torch.zeros(4, 1), [torch.zeros(2, 3)], {"boxes": torch.zeros(2, 3)}],
)
def test_outputs_without_logits_are_refused_with_what_to_do(outputs: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"allowed: .* or distance=fn\(low, full\)"):
        distillation.kl_divergence(outputs, outputs)
