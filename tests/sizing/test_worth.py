"""Loss per cost: against every choice of ranks."""

from itertools import product

import numpy as np
import pytest

from decomposable_edge.sizing.order import worth


def best_first(scores):
    layers = np.repeat(np.arange(len(scores)), [len(s) for s in scores])
    return layers[np.argsort(-np.concatenate(scores), kind="stable")]


@pytest.mark.parametrize("seed", range(20))
def test_prefixes_are_the_best_choices_for_what_they_cost(seed):
    """At the corners of the hulls, no other choice of ranks with that cost or less loses less."""
    rng = np.random.default_rng(seed)
    layers = [
        (np.sort(rng.exponential(size=k) ** 2)[::-1], int(rng.integers(1, 9)), k) for k in rng.integers(2, 6, size=3)
    ]
    dense = [int(rng.integers(per, per * k + 1)) for _, per, k in layers]

    def cost(i, rank):
        _, per, k = layers[i]
        return dense[i] if rank == k else min(dense[i], rank * per)

    def lost(i, rank):
        losses, per, _ = layers[i]
        return 0.0 if rank * per >= dense[i] else losses[rank:].sum()

    scores = [worth(s, per_rank=per, dense=d) for (s, per, _), d in zip(layers, dense, strict=True)]
    order = best_first(scores)
    values = np.sort(np.concatenate(scores))[::-1]
    choices = list(product(*(range(k + 1) for _, _, k in layers)))
    for length in range(len(order) + 1):
        if 0 < length < len(order) and np.isclose(values[length - 1], values[length]):
            continue  # inside a segment of a hull
        ranks = np.bincount(order[:length], minlength=3)
        mine, price = sum(map(lost, range(3), ranks)), sum(map(cost, range(3), ranks))
        best = min(sum(map(lost, range(3), c)) for c in choices if sum(map(cost, range(3), c)) <= price)
        assert mine <= best + 1e-9


def test_scores_never_rise():
    rng = np.random.default_rng(0)
    for _ in range(50):
        losses = np.sort(rng.exponential(size=int(rng.integers(1, 30))))[::-1]
        for is_whole in (True, False):
            found = worth(losses, per_rank=int(rng.integers(1, 50)), dense=int(rng.integers(1, 500)), is_whole=is_whole)
            assert (np.diff(found) <= 1e-12).all()
            assert (found >= 0).all()


def test_a_layer_that_was_cut_already_has_two_factors_at_every_rank():
    losses = np.array([8.0, 4.0, 2.0])
    assert worth(losses, per_rank=2, dense=10, is_whole=False).tolist() == [4.0, 2.0, 1.0]


def test_a_layer_that_costs_nothing():
    assert np.isfinite(worth(np.array([2.0, 1.0]), per_rank=0, dense=0)).all()
