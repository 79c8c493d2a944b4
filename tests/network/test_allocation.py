"""How a cut is shared out among the layers: an exponent that is found by what the network says."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.core.distillation import kl_divergence
from decomposable.core.tracing import call_with_first
from decomposable.network import importance
from decomposable.network.allocation import EXPONENTS, IMAGES, Judge, best_exponent, shared_out


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
    ).eval()


def batches(count=3, size=16):
    return [torch.randn(size, 3, 6, 6, generator=torch.Generator().manual_seed(i)) for i in range(count)]


@pytest.mark.parametrize("start", EXPONENTS)
@pytest.mark.parametrize("best", EXPONENTS)
def test_a_valley_is_found_from_everywhere(start, best):
    assert best_exponent(lambda e: abs(e - best), start) == best


def test_no_exponent_is_tried_twice_and_only_as_many_as_it_takes():
    tried = []
    assert best_exponent(lambda e: tried.append(e) or e, 0.0) == 0.0
    assert tried == [0.25, 0.0]


def test_what_cannot_be_told_changes_nothing():
    """NaN, of a network that overflows, is no reason to go there."""
    assert best_exponent(lambda e: math.nan, 0.5) == 0.5


def test_losses_are_relative_to_their_sum_at_one_and_layers_without_loss_stay():
    found = shared_out({"a": np.array([6.0, 2.0]), "b": np.zeros(2)}, 1.0)
    assert found["a"].tolist() == [0.75, 0.25]
    assert found["b"].tolist() == [0.0, 0.0]
    assert shared_out({"a": np.array([6.0, 2.0])}, 0.0)["a"].tolist() == [6.0, 2.0]


def test_the_distance_is_the_divergence_with_each_batch_normalised_by_itself():
    model, other = network(), network()
    with torch.no_grad():
        other[4].weight.mul_(1.3)
    judge = Judge.of(model, batches(), call_with_first)
    kept = {name: value.clone() for name, value in other.state_dict().items()}
    found = judge.distance(other)
    assert all(torch.equal(value, kept[name]) for name, value in other.state_dict().items())
    assert not any(module.training for module in other.modules())
    other[1].train()
    with torch.no_grad():
        wanted = np.mean([float(kl_divergence(other(x), model(x))) for x in batches()])
    assert found == pytest.approx(wanted, rel=1e-6)


def test_no_more_images_than_it_takes():
    assert len(Judge.of(network(), batches(count=30), call_with_first).batches) == math.ceil(IMAGES / 16)
    assert len(Judge.of(network(), batches(count=2), call_with_first).batches) == 2


def test_the_exponent_that_is_taken_is_the_nearest_to_the_full_network(monkeypatch):
    """At every size at which a cut is shared out anew, no neighbour of it is nearer."""
    seen = []

    def noting(distance, start):
        taken = best_exponent(distance, start)
        place = EXPONENTS.index(taken)
        neighbours = [EXPONENTS[i] for i in (place - 1, place + 1) if 0 <= i < len(EXPONENTS)]
        seen.append((distance(taken), [distance(e) for e in neighbours]))
        return taken

    monkeypatch.setattr(importance, "best_exponent", noting)
    net = dn.decompose(network(), data=batches())
    goals = sum(size > net.selector.smallest_size for size in importance.SIZES)
    assert len(seen) == 2 * goals > 2  # the goals, half-way between them, and one size below the last
    assert all(nearest <= min(others) for nearest, others in seen)


def test_outputs_are_compared_for_the_loss_only(monkeypatch):
    monkeypatch.setattr(importance.Judge, "of", lambda *_: pytest.fail("outputs may be anything here"))
    dn.decompose(network(), data=batches(), criterion="output")
