"""Chains: shapes, ranks and costs, and plans of layers with several cuts against brute force."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposable_edge.fields import Damaged
from decomposable_edge.sizing.chain import Chain, check_chain, price, rank_of, ranks_of
from decomposable_edge.sizing.cost import LayerCost, LayerShape
from decomposable_edge.sizing.order import rank_limits
from decomposable_edge.sizing.plans import SizeRequest
from decomposable_edge.sizing.ranks import RankSelector
from refusals import refused

TUCKER = ((False, False), (True, True), (False, False))


def chosen(selector, **size):
    return selector.plan_for(SizeRequest(**size))


def cost_of(name, shape, stages, positions=None):
    layer = LayerShape(name=name, form="one", shape=shape, stages=stages)
    positions = positions or [7] * len(stages)
    macs = [size * each for size, each in zip(layer.chain.sizes, positions, strict=True)]
    per_rank = sum(macs) if len(stages) == 2 else tuple(macs)
    return LayerCost.of(layer, dense_macs=math.prod(shape) * positions[-1], macs_per_rank=per_rank)


@pytest.mark.parametrize(
    ("shape", "stages", "full"),
    [
        ((8, 4, 3, 5), ((True, True), (False, False)), (8,)),
        ((8, 4, 3, 5), ((False, True), (True, False)), (20,)),
        ((8, 4, 3, 5), TUCKER, (4, 8)),
        ((64, 3, 3, 3), TUCKER, (3, 27)),
        ((2, 64, 3, 3), TUCKER, (18, 2)),
        ((8, 4, 3), ((True,), (False,)), (8,)),
        ((8, 4), ((), ()), (4,)),
    ],
)
def test_full_ranks_are_those_of_the_matrix_at_each_cut(shape, stages, full):
    chain = Chain(shape, stages)
    assert chain.full_ranks == full
    assert ranks_of(chain.full_rank) == full
    assert sum(math.prod(each) for each in chain.shapes(full)) == price(chain.sizes, full)


def test_a_price_never_falls_as_a_rank_grows():
    per_stage = (5, 2, 9)
    for a, b in itertools.product(range(1, 5), repeat=2):
        assert price(per_stage, (a, b)) == 5 * a + 2 * a * b + 9 * b
        assert price(per_stage, (a + 1, b)) > price(per_stage, (a, b)) < price(per_stage, (a, b + 1))


@pytest.mark.parametrize(
    "stages",
    [(), (TUCKER[0],), (TUCKER[0], TUCKER[0]), (TUCKER[1], TUCKER[1]), ((True,), (False,)), (TUCKER[0],) * 9],
)
def test_stages_that_are_no_chain_are_refused(stages):
    with pytest.raises(Damaged, match="layer 'conv'"):
        check_chain("conv", (8, 4, 3, 3), stages)


def selector_of(costs, scores, **options):
    names = [cost.name for cost in costs for _ in cost.full_ranks]
    full = [rank for cost in costs for rank in cost.full_ranks]
    lower, upper = rank_limits(names, full, options.pop("min_rank", 1), options.pop("limits", None))
    return RankSelector(
        costs=costs, scores=scores, fixed_macs=100, fixed_params=11, lower=lower, upper=upper, **options
    )


def mixed(seed):
    random = np.random.default_rng(seed)
    costs = (
        cost_of("a", (6, 4, 3, 3), TUCKER, [30, 9, 9]),
        cost_of("b", (5, 6, 3, 3), ((False, True), (True, False)), [20, 8]),
        cost_of("c", (3, 8, 3, 1), TUCKER, [9, 9, 9]),
        cost_of("d", (4, 5), ((), ()), [1, 1]),
    )
    draw = random.integers(1, 9, 200).astype(float) if seed % 2 else random.random(200)  # with ties, too
    values = iter(draw)
    scores = tuple(np.sort([next(values) for _ in range(full)])[::-1] for cost in costs for full in cost.full_ranks)
    return selector_of(costs, scores)


def brute_force(selector, measure):
    """All prefixes of the list, from nothing to everything: ranks, and the cost of each."""
    cuts = [(i, cut) for i, cost in enumerate(selector.costs) for cut in range(len(cost.full_ranks))]
    owner = [place for place, full in enumerate(selector.full_ranks) for _ in range(full)]
    kept, found = [0] * len(cuts), []
    for basis in [None, *selector.order]:
        if basis is not None:
            kept[owner[basis]] += 1
        ranks = np.clip(kept, selector.lower, selector.upper)
        total = selector.fixed_params if measure == "params" else selector.fixed_macs
        for i, cost in enumerate(selector.costs):
            own = [int(r) for r, (layer, _) in zip(ranks, cuts, strict=True) if layer == i]
            dense, per = getattr(cost, f"dense_{measure}"), getattr(cost, f"{measure}_per_rank")
            if isinstance(per, tuple):
                chain = per[0] * own[0] + per[1] * own[0] * own[1] + per[2] * own[1]
            else:
                chain = per * own[0]
            total += dense if own == list(cost.full_ranks) else min(dense, chain)
        found.append((ranks.copy(), total))
    return found


@settings(deadline=None, derandomize=True, max_examples=30)
@given(seed=st.integers(0, 1000), measure=st.sampled_from(["macs", "params"]))
def test_a_budget_buys_the_longest_prefix_whose_exact_cost_is_within_it(seed, measure):
    selector = mixed(seed)
    prefixes = brute_force(selector, measure)
    largest = {cost.name: most for cost, most in selector.by_layer(selector.upper)}
    costs = [cost for _, cost in prefixes]
    assert costs == sorted(costs)
    assert selector._table(1).costs[measure].tolist() == costs
    for budget in np.linspace(costs[0], costs[-1], 17).astype(int).tolist():
        plan = chosen(selector, **{measure: budget})
        assert getattr(plan, measure) <= budget
        ranks = [r for r, cost in prefixes if cost <= budget][-1]
        for name, given_ranks, dense in _by_layer(selector, ranks, plan):
            assert ranks_of(plan.ranks[name]) == (largest[name] if dense else given_ranks)


def _by_layer(selector, ranks, plan):
    left = iter(ranks.tolist())
    for cost in selector.costs:
        yield cost.name, tuple(next(left) for _ in cost.full_ranks), cost.name in plan.dense


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("align", [1, 2, "auto"])
def test_plans_are_nested(seed, align):
    selector = mixed(seed)
    smallest = selector.smallest_cost("macs", align)
    before = None
    for budget in np.linspace(smallest, selector.full_cost("macs"), 40).astype(int).tolist():
        plan = chosen(selector, macs=budget, align=align)
        ranks = selector.as_array(plan.ranks)
        assert plan.macs <= budget
        assert before is None or (ranks >= before).all()
        before = ranks


def test_ranks_are_an_int_for_one_cut_and_a_tuple_for_several():
    selector = mixed(0)
    plan = chosen(selector, ranks={"a": (2, 3), "b": 4})
    assert plan.ranks == {"a": (2, 3), "b": 4, "c": (8, 3), "d": 4}
    assert plan.full_ranks == {"a": (4, 6), "b": 15, "c": (8, 3), "d": 4}
    assert plan.runs_as("a") == "factors"
    assert plan.runs_as("c") == "full"
    assert plan.macs == 100 + 2 * 4 * 30 + 2 * 3 * 9 * 9 + 3 * 6 * 9 + 4 * (18 * 20 + 15 * 8) + 8 * 9 * 9 + 20
    assert "three factors" in str(plan)
    assert "2×3" in str(plan)
    assert chosen(selector, ranks={"a": [2, 3]}).ranks["a"] == (2, 3)
    assert hash(plan.ranks) == hash(chosen(selector, ranks={"a": (2, 3), "b": 4}).ranks)


@pytest.mark.parametrize(
    ("layer", "rank", "allowed"),
    [
        ("a", 3, "a tuple of 2 ints, 1 to 4 and 1 to 6"),
        ("a", (3,), "a tuple of 2 ints, 1 to 4 and 1 to 6"),
        ("a", (0, 3), "a tuple of 2 ints, 1 to 4 and 1 to 6"),
        ("a", (5, 3), "a tuple of 2 ints, 1 to 4 and 1 to 6"),
        ("b", (3,), "an int, 1 to 15"),
    ],
)
def test_ranks_of_the_wrong_kind_are_refused(layer, rank, allowed):
    with refused("ranks", rank, allowed, layer=layer):
        chosen(mixed(0), ranks={layer: rank})


def test_limits_hold_for_every_cut_of_a_layer():
    selector = mixed(0)
    lower, upper = rank_limits(["a", "a", "b"], [4, 6, 15], 1, {"a": (2, 5)})
    assert lower.tolist() == [2, 2, 1]
    assert upper.tolist() == [4, 5, 15]
    with refused("limits", "x"):
        rank_limits(["a", "a", "b"], [4, 6, 15], 1, {"x": (1, 2)})
    assert rank_of((3,)) == 3
    assert selector.smallest_plan().ranks["a"] == (1, 1)
