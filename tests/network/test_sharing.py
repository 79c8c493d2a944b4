"""How a cut is shared out among the layers: an exponent that is found by what the network says."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.network import descent, work
from decomposable.network.sharing import AS_WEIGHTS, EXPONENTS, TurnedBases, best_way


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
    assert best_way(lambda way: math.inf if way == AS_WEIGHTS else abs(way - best), start) == best


def test_no_way_is_tried_twice_and_only_as_many_as_it_takes():
    tried = []
    assert best_way(lambda way: tried.append(way) or (1.0 if way == AS_WEIGHTS else way), 0.0) == 0.0
    assert tried == [0.25, 0.0, AS_WEIGHTS]


def test_what_cannot_be_told_changes_nothing():
    """NaN, of a network that overflows, is no reason to go there."""
    assert best_way(lambda way: math.nan, 0.5) == 0.5


def test_losses_are_relative_to_their_sum_at_one_and_layers_without_loss_stay():
    def bases(*losses):
        return TurnedBases(torch.eye(2), torch.eye(2), 2, losses=np.array(losses))

    assert bases(6.0, 2.0).shared(1.0).tolist() == [0.75, 0.25]
    assert bases(0.0, 0.0).shared(1.0).tolist() == [0.0, 0.0]
    assert bases(6.0, 2.0).shared(0.0).tolist() == [6.0, 2.0]


@pytest.mark.parametrize("start", [0.0, 0.75, AS_WEIGHTS])
def test_the_way_of_the_weights_is_taken_where_it_is_nearest(start):
    assert best_way(lambda way: 0.5 if way == AS_WEIGHTS else way + 0.6, start) == AS_WEIGHTS
    assert best_way(lambda way: 0.7 if way == AS_WEIGHTS else way + 0.6, start) == 0.0
    assert best_way(lambda way: math.nan, start) != AS_WEIGHTS


@pytest.mark.filterwarnings("ignore:data. on 64 samples")  # of a network with random weights data know nothing better
def test_the_way_that_is_taken_is_the_nearest_to_the_full_network(monkeypatch):
    """At every size at which a cut is shared out anew, no neighbour of it is nearer, nor the way of the weights."""
    seen = []

    def noting(distance, start):
        taken = best_way(distance, start)
        others = [AS_WEIGHTS]
        if taken != AS_WEIGHTS:
            place = EXPONENTS.index(taken)
            others += [EXPONENTS[i] for i in (place - 1, place + 1) if 0 <= i < len(EXPONENTS)]
        seen.append((distance(taken), [distance(way) for way in others]))
        return taken

    monkeypatch.setattr(descent, "best_way", noting)
    net = dn.decompose(network(), data=batches(count=24))
    steps = [size for _, sizes in work.stages(net.selector.smallest_size) for size in sizes]
    assert len(seen) == len(steps) > 4
    assert steps == sorted(steps, reverse=True)
    assert all(nearest <= min(others) for nearest, others in seen)
