import contextlib
import copy
import dataclasses
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decomposable
from decomposable_edge.checks import check_ratio
from decomposable_edge.errors import BudgetError, InvalidArgumentError
from decomposable_edge.sizing import rounding
from decomposable_edge.sizing.cost import LayerCost
from decomposable_edge.sizing.order import prefix_ranks, rank_limits
from decomposable_edge.sizing.plans import SizeKeywords, SizeRequest, absolute_budget
from decomposable_edge.sizing.ranks import RankSelector
from decomposable_edge.sizing.rounding import AUTO_PERCENT, aligned_ranks, auto_ranks, rounded_ranks
from refusals import Saying, refused

some_networks = settings(deadline=None, derandomize=True, max_examples=60)


def chosen(selector, **size):
    return selector.plan_for(SizeRequest(**size))


def layer(name: str, rows: int, columns: int, outputs: int = 1, between: int = 1) -> LayerCost:
    """A layer with an M × N matrix, applied at so many positions."""
    return LayerCost(
        name=name,
        full_rank=min(rows, columns),
        dense_macs=rows * columns * outputs,
        macs_per_rank=rows * between + columns * outputs,
        dense_params=rows * columns,
        params_per_rank=rows + columns,
    )


def selector(*costs: LayerCost, scores=None, fixed_macs=0, fixed_params=0, **limits) -> RankSelector:
    full = [cost.full_rank for cost in costs]
    if scores is None:
        scores = [np.linspace(i + 10, i + 1, size) for i, size in enumerate(full)]
    lower, upper = rank_limits([cost.name for cost in costs], full, limits.get("min_rank", 1), limits.get("limits"))
    return RankSelector(
        costs=costs,
        scores=tuple(np.asarray(s, dtype=float) for s in scores),
        fixed_macs=fixed_macs,
        fixed_params=fixed_params,
        lower=lower,
        upper=upper,
    )


@st.composite
def networks(draw) -> RankSelector:
    """One to three small layers with random shapes, scores (ties too) and limits."""
    costs, scores, limits = [], [], {}
    for i in range(draw(st.integers(1, 3))):
        rows, columns, outputs = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
        costs.append(layer(f"layer{i}", rows, columns, outputs, between=draw(st.integers(outputs, 5))))
        full = costs[-1].full_rank
        drawn = draw(st.lists(st.integers(0, 8), min_size=full, max_size=full))
        scores.append(sorted(drawn, reverse=True))
        if draw(st.booleans()):
            low = draw(st.integers(1, full))
            limits[f"layer{i}"] = (low, draw(st.integers(low, full)))
    fixed_macs, fixed_params = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    return selector(
        *costs,
        scores=scores,
        fixed_macs=fixed_macs,
        fixed_params=fixed_params,
        min_rank=draw(st.integers(1, 3)),
        limits=limits,
    )


def every_prefix(chooser: RankSelector):
    """The ranks of every length of the list, by counting one basis after the other."""
    bases = [(-s, i, j) for i, scores in enumerate(chooser.scores) for j, s in enumerate(scores)]
    counts = [0] * len(chooser.costs)
    for basis in [None, *sorted(bases)]:
        if basis is not None:
            counts[basis[1]] += 1
        yield [
            int(min(max(count, low), high))
            for count, low, high in zip(counts, chooser.lower, chooser.upper, strict=True)
        ]


def price(cost: LayerCost, rank: int, measure: str) -> tuple[int, bool]:
    """What a layer costs, and whether it is dense: where factors would cost more, or nothing is dropped."""
    dense, per_rank = getattr(cost, f"dense_{measure}"), getattr(cost, f"{measure}_per_rank")
    is_dense = rank == cost.full_rank or rank * per_rank > dense
    return (dense if is_dense else rank * per_rank), is_dense


def network_price(chooser: RankSelector, ranks: list[int], measure: str) -> int:
    fixed = chooser.fixed_macs if measure == "macs" else chooser.fixed_params
    return fixed + sum(price(c, r, measure)[0] for c, r in zip(chooser.costs, ranks, strict=True))


# Budgets of MACs and parameters


@pytest.mark.parametrize("measure", ["macs", "params"])
@some_networks
@given(chooser=networks(), data=st.data())
def test_plan_is_the_longest_prefix_that_fits(measure, chooser, data):
    prefixes = list(every_prefix(chooser))
    prices = [network_price(chooser, ranks, measure) for ranks in prefixes]
    budget = data.draw(st.integers(max(2, min(prices)), max(2, max(prices)) + 3))
    longest = [ranks for ranks, cost in zip(prefixes, prices, strict=True) if cost <= budget][-1]
    plan = chosen(chooser, **{measure: budget})
    for i, cost in enumerate(chooser.costs):
        is_dense = price(cost, longest[i], measure)[1]
        assert (cost.name in plan.dense) == is_dense
        assert plan.ranks[cost.name] == (chooser.upper[i] if is_dense else longest[i])
    assert getattr(plan, measure) == network_price(chooser, longest, measure) <= budget


@pytest.mark.parametrize("measure", ["macs", "params"])
@some_networks
@given(chooser=networks(), data=st.data())
def test_plans_are_nested(measure, chooser, data):
    smallest, total = chooser.smallest_cost(measure), chooser.full_cost(measure)
    budgets = st.integers(max(2, smallest), max(2, smallest, total))
    small, large = sorted((data.draw(budgets), data.draw(budgets)))
    inner, outer = chosen(chooser, **{measure: small}), chosen(chooser, **{measure: large})
    assert all(inner.ranks[name] <= outer.ranks[name] for name in inner.ranks)


@some_networks
@given(chooser=networks(), fraction=st.floats(0.01, 1))
def test_a_fraction_is_of_the_original_network_with_the_layers_left_alone(chooser, fraction):
    total = chooser.fixed_macs + sum(cost.dense_macs for cost in chooser.costs)
    try:
        plan = chosen(chooser, macs=fraction)
    except BudgetError:
        assert chooser.smallest_cost("macs") / total > fraction
    else:
        assert plan.full_macs == total
        assert plan.macs / total <= fraction


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_the_whole_budget_is_the_original_network(measure):
    chooser = selector(layer("a", 8, 6), layer("b", 3, 9), fixed_macs=5, fixed_params=7)
    plan = chosen(chooser, **{measure: 1.0})
    assert plan == chooser.full_plan()
    assert plan.is_full
    assert plan.dense == {"a", "b"}
    assert (plan.macs, plan.params, plan.ratio) == (5 + 48 + 27, 7 + 48 + 27, 1.0)


def test_a_layer_whose_factors_would_cost_more_is_dense_with_its_full_rank():
    chooser = selector(layer("a", 10, 10), scores=[np.arange(10, 0, -1)])
    assert dict(chosen(chooser, params=100).ranks) == {"a": 10}  # 6 bases would cost 120
    plan = chosen(chooser, params=99)
    assert (dict(plan.ranks), plan.dense, plan.params) == ({"a": 4}, frozenset(), 80)


def test_factors_that_cost_exactly_as_much_as_dense_stay_factors():
    chooser = selector(layer("a", 10, 10), scores=[np.arange(10, 0, -1)], limits={"a": (5, 5)})
    plan = chosen(chooser, params=100)
    assert (plan.ranks["a"], plan.dense, plan.params) == (5, frozenset(), 100)


def test_dense_is_judged_by_the_measure_of_the_budget():
    """Here the factors of rank 4 have fewer parameters than dense, and more MACs."""
    chooser = selector(layer("a", 10, 10, outputs=1, between=4), limits={"a": (4, 4)})
    assert chosen(chooser, params=1.0).dense == frozenset()
    assert chosen(chooser, macs=1.0).dense == {"a"}


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_an_impossible_budget_states_the_smallest_possible_one(measure):
    chooser = selector(layer("a", 20, 20), layer("b", 30, 30), fixed_macs=11, fixed_params=11)
    with pytest.raises(BudgetError) as caught:
        chosen(chooser, **{measure: 0.001})
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.option, error.came, error.smallest) == (measure, 0.001, 111 / 1311)
    assert "111 of 1,311" in error.allowed  # 11 + 1·40 + 1·60 of 11 + 400 + 900
    assert f"{measure}=0.001 is too small" in str(error)
    assert getattr(chosen(chooser, **{measure: 111}), measure) == 111
    with pytest.raises(BudgetError):
        chosen(chooser, **{measure: 110})


@pytest.mark.parametrize("fixed", [0, 5, 11, 17, 23])
def test_the_smallest_fraction_that_an_error_states_is_possible(fixed):
    chooser = selector(layer("a", 20, 20), layer("b", 30, 30), fixed_macs=fixed)
    with pytest.raises(BudgetError) as caught:
        chosen(chooser, macs=0.001)
    stated = float(re.search(r"smallest possible is ([\d.]+)", str(caught.value)).group(1))
    assert chosen(chooser, macs=stated).macs == fixed + 100


def test_layers_left_alone_count_in_the_budget():
    free, fixed = (selector(layer("a", 10, 10), fixed_params=n) for n in (0, 60))
    assert chosen(free, params=80).ranks["a"] == 4
    assert chosen(fixed, params=80).ranks["a"] == 1


def test_macs_without_feature_maps_ask_for_an_example_input():
    chooser = selector(layer("a", 10, 10), fixed_macs=None)
    with refused("macs", 0.5, Saying("^params, ratio, ranks, or .*example_input")):
        chosen(chooser, macs=0.5)
    plan = chosen(chooser, params=0.5)
    assert (plan.macs, plan.full_macs, plan.macs_fraction) == (None, None, None)


# Ranks rounded to multiples


def nearest(rank: int, low: int, high: int, full: int, align: int) -> int:
    """The allowed rank nearest to this one, found by trying all; halfway, the larger."""
    multiples = [r for r in range(low, high + 1) if r % align == 0]
    if not multiples:
        return rank
    allowed = [*multiples, *([full] if high == full else [])]
    return min(allowed, key=lambda r: (abs(r - rank), -r))


def every_aligned_prefix(chooser: RankSelector, align: int) -> list[list[int]]:
    limits = list(zip(chooser.lower.tolist(), chooser.upper.tolist(), chooser.full_ranks.tolist(), strict=True))
    return [
        [nearest(rank, *limit, align) for rank, limit in zip(ranks, limits, strict=True)]
        for ranks in every_prefix(chooser)
    ]


@given(full=st.integers(1, 40), align=st.integers(1, 12), data=st.data())
@settings(deadline=None, derandomize=True, max_examples=150)
def test_a_rounded_rank_is_the_nearest_allowed_one(full, align, data):
    low = data.draw(st.integers(1, full))
    high = data.draw(st.integers(low, full))
    expected = [nearest(min(max(kept, low), high), low, high, full, align) for kept in range(full + 1)]
    rounded = aligned_ranks(low, high, full, align)
    assert rounded.tolist() == expected
    assert (np.diff(rounded) >= 0).all()
    assert (low <= rounded).all()
    assert (rounded <= high).all()


@pytest.mark.parametrize("measure", ["macs", "params"])
@some_networks
@given(chooser=networks(), align=st.integers(1, 5), data=st.data())
def test_an_aligned_plan_is_the_longest_prefix_that_fits_when_rounded(measure, chooser, align, data):
    prefixes = every_aligned_prefix(chooser, align)
    prices = [network_price(chooser, ranks, measure) for ranks in prefixes]
    budget = data.draw(st.integers(max(2, min(prices)), max(2, max(prices)) + 3))
    longest = [ranks for ranks, cost in zip(prefixes, prices, strict=True) if cost <= budget][-1]
    plan = chosen(chooser, **{measure: budget}, align=align)
    assert getattr(plan, measure) == network_price(chooser, longest, measure) <= budget
    for i, cost in enumerate(chooser.costs):
        rank, is_dense = plan.ranks[cost.name], price(cost, longest[i], measure)[1]
        assert (cost.name in plan.dense) == is_dense
        assert rank == (chooser.upper[i] if is_dense else longest[i])
        has_multiple = chooser.upper[i] // align * align >= chooser.lower[i]
        assert is_dense or not has_multiple or rank % align == 0


@pytest.mark.parametrize("measure", ["macs", "params"])
@some_networks
@given(chooser=networks(), align=st.integers(1, 5), data=st.data())
def test_aligned_plans_are_nested(measure, chooser, align, data):
    smallest, total = chooser.smallest_cost(measure, align), chooser.full_cost(measure)
    budgets = st.integers(max(2, smallest), max(2, smallest, total))
    small, large = sorted((data.draw(budgets), data.draw(budgets)))
    inner, outer = (chosen(chooser, **{measure: budget}, align=align) for budget in (small, large))
    assert all(inner.ranks[name] <= outer.ranks[name] for name in inner.ranks)


@some_networks
@given(chooser=networks(), align=st.integers(1, 5), ratio=st.floats(0.01, 1))
def test_an_aligned_ratio_is_the_rounded_prefix(chooser, align, ratio):
    prefixes = every_aligned_prefix(chooser, align)
    plan = chosen(chooser, ratio=ratio, align=align)
    assert list(plan.ranks.values()) == prefixes[round(ratio * (len(prefixes) - 1))]


@some_networks
@given(chooser=networks(), size=st.sampled_from(["macs", "params", "ratio"]), fraction=st.floats(0.05, 1))
def test_an_alignment_of_1_is_none(chooser, size, fraction):
    try:
        plan = chosen(chooser, **{size: fraction})
    except BudgetError as error:
        with refused(error.option, error.came, error.allowed, kind=BudgetError, smallest=error.smallest):
            chosen(chooser, **{size: fraction}, align=1)
    else:
        assert chosen(chooser, **{size: fraction}, align=1) == plan


@pytest.mark.parametrize("align", [2, 7, 8, 16, 1000])
def test_the_whole_budget_is_the_original_network_at_any_alignment(align):
    chooser = selector(layer("a", 30, 20), layer("b", 3, 9), fixed_macs=5, fixed_params=7)
    assert chosen(chooser, macs=1.0, align=align) == chosen(chooser, ratio=1.0, align=align) == chooser.full_plan()


def test_a_layer_too_thin_for_the_alignment_keeps_its_rank():
    chooser = selector(layer("thin", 3, 100), layer("wide", 100, 100), scores=[[9, 5, 1], np.linspace(10, 1, 100)])
    plan = chosen(chooser, ratio=0.5, align=16)
    assert plan.ranks["wide"] % 16 == 0
    assert plan.ranks["thin"] == chosen(chooser, ratio=0.5).ranks["thin"]


def test_limits_that_are_no_multiples_are_kept():
    chooser = selector(layer("a", 100, 100), limits={"a": (5, 30)})
    ranks = {chosen(chooser, params=params, align=8).ranks["a"] for params in range(1600, 10_001, 100)}
    assert ranks == {8, 16, 24}


def test_a_network_that_lost_bases_is_aligned_below_what_is_stored():
    whole = selector(layer("a", 100, 100))
    shrunk = dataclasses.replace(whole, upper=np.array([30]), stored=np.array([30]))
    assert chosen(shrunk, macs=1.0).ranks["a"] == 30
    assert chosen(shrunk, macs=1.0, align=8).ranks["a"] == 24
    assert chosen(shrunk, ratio=1.0, align=8).ranks["a"] == 24
    assert chosen(shrunk, macs=0.2, align=8).ranks["a"] == 8  # 0.2 are 10 bases


@pytest.mark.parametrize("measure", ["macs", "params"])
def test_a_budget_that_is_impossible_when_aligned_only_says_both(measure):
    chooser = selector(layer("a", 20, 20), layer("b", 30, 30), fixed_macs=11, fixed_params=11)
    with refused(measure, 200, kind=BudgetError, smallest=411 / 1311) as caught:
        chosen(chooser, **{measure: 200}, align=4)
    aligned, unaligned = re.findall(r"\(([\d,]+) of 1,311", str(caught.value))
    assert (aligned, unaligned) == ("411", "111")
    assert getattr(chosen(chooser, **{measure: 411}, align=4), measure) == 411
    stated = float(re.search(r"smallest possible is ([\d.]+)", str(caught.value)).group(1))
    assert getattr(chosen(chooser, **{measure: stated}, align=4), measure) == 411
    assert getattr(chosen(chooser, **{measure: 200}), measure) <= 200


@pytest.mark.parametrize("align", [0, -8, 8.0, True, "8", "measured", "Auto"])
def test_a_wrong_alignment_is_refused(align):
    with pytest.raises(InvalidArgumentError) as caught:
        chosen(selector(layer("a", 10, 10)), params=0.5, align=align)
    assert (caught.value.option, caught.value.came) == ("align", align)
    assert caught.value.allowed == "an int of at least 1, such as 8 or 16, or 'auto'"


def test_given_ranks_are_not_rounded():
    chooser = selector(layer("a", 10, 10))
    assert chosen(chooser, ranks={"a": 3}, align=1) == chosen(chooser, ranks={"a": 3})
    with pytest.raises(InvalidArgumentError) as caught:
        chosen(chooser, ranks={"a": 3}, align=8)
    assert (caught.value.option, caught.value.came, caught.value.allowed) == ("align", 8, "one of align and ranks")


def test_the_table_of_an_alignment_is_made_once(monkeypatch):
    chooser, made = selector(layer("a", 10, 10), layer("b", 20, 20)), []
    monkeypatch.setattr("decomposable_edge.sizing.ranks.rounded_ranks", lambda *a: made.append(a) or rounded_ranks(*a))
    for align in (4, 8, 4, 8, 21, 1000):  # above the largest rank, all are one
        chosen(chooser, params=1.0, align=align)
    assert len(made) == 3 * 2


# Ranks rounded each to what suits it


def limits_of(data, full):
    low = data.draw(st.integers(1, full))
    return low, data.draw(st.integers(low, full))


def auto(rank: int, low: int, high: int, full: int) -> int:
    """In the words of the promise: the largest of 16, 8 or 4 that moves the rank by only a few percent."""
    if full < rounding.AUTO_WIDE or rank == high:
        return rank
    for multiple in (16, 8, 4):
        allowed = {low, *([full] if high == full else []), *(r for r in range(low, high + 1) if r % multiple == 0)}
        found = min(allowed, key=lambda r: (abs(r - rank), -r))
        if 100 * abs(found - rank) <= AUTO_PERCENT * rank:
            return found
    return rank


wide = {"full": st.integers(1, 600), "data": st.data()}


@contextlib.contextmanager
def narrow_counts_as_wide():
    """So that small networks will do."""
    with mock.patch("decomposable_edge.sizing.rounding.AUTO_WIDE", 20):
        rounded_ranks.cache_clear()
        yield
    rounded_ranks.cache_clear()


@given(**wide)
@settings(deadline=None, derandomize=True, max_examples=150)
def test_auto_takes_the_largest_multiple_that_moves_a_rank_by_a_few_percent(full, data):
    low, high = limits_of(data, full)
    kept = [min(max(k, low), high) for k in range(full + 1)]
    assert auto_ranks(low, high, full).tolist() == [auto(k, low, high, full) for k in kept]


@given(**wide)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_auto_never_falls_stays_within_limits_and_moves_a_rank_by_a_few_percent_at_most(full, data):
    low, high = limits_of(data, full)
    percent = data.draw(st.sampled_from((AUTO_PERCENT, *range(1, 100))))  # it would hold for any
    ranks = auto_ranks(low, high, full, percent)
    kept = np.clip(np.arange(full + 1), low, high)
    assert (np.diff(ranks) >= 0).all()
    assert (low <= ranks).all()
    assert (ranks <= high).all()
    assert (100 * abs(ranks - kept) <= percent * kept).all()
    assert (ranks[0], ranks[full]) == (low, high)  # the smallest and the largest size stay what they are
    assert AUTO_PERCENT <= 5  # a few


def test_auto_leaves_narrow_layers_alone_and_rounds_wide_ones():
    ranks = auto_ranks(1, 2000, 2000)
    assert auto_ranks(1, 255, 255).tolist() == [1, *range(1, 256)]
    assert ranks[:16].tolist() == [1, *range(1, 16)]
    assert ranks[[17, 18, 31, 33, 35, 39, 49]].tolist() == [17, 18, 32, 32, 36, 40, 48]
    for multiple in (4, 8, 16):  # half of it is few percent of the rank
        assert (ranks[-(-50 * multiple // AUTO_PERCENT) : -16] % multiple == 0).all()


@st.composite
def wide_networks(draw) -> RankSelector:
    """One to three layers that are wide enough to be rounded, with random scores and limits."""
    costs, limits = [], {}
    for i in range(draw(st.integers(1, 3))):
        rows, columns = draw(st.integers(20, 120)), draw(st.integers(20, 120))
        costs.append(layer(f"layer{i}", rows, columns, draw(st.integers(1, 4)), between=draw(st.integers(4, 5))))
        if draw(st.booleans()):
            low = draw(st.integers(1, costs[-1].full_rank))
            limits[f"layer{i}"] = (low, draw(st.integers(low, costs[-1].full_rank)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    scores = [np.sort(random.random(cost.full_rank))[::-1] for cost in costs]
    fixed = draw(st.integers(0, 3000))
    return selector(*costs, scores=scores, fixed_macs=fixed, fixed_params=fixed, limits=limits)


def drawn_budget(chooser, measure, data):
    smallest, total = chooser.smallest_cost(measure), chooser.full_cost(measure)
    return data.draw(st.integers(max(2, smallest), max(2, smallest, total)))


@pytest.mark.parametrize("measure", ["macs", "params"])
@some_networks
@given(chooser=wide_networks(), data=st.data())
def test_an_auto_plan_is_the_longest_prefix_that_fits_when_rounded(measure, chooser, data):
    with narrow_counts_as_wide():
        budget = drawn_budget(chooser, measure, data)
        limits = list(zip(chooser.lower.tolist(), chooser.upper.tolist(), chooser.full_ranks.tolist(), strict=True))
        prefixes = [[auto(k, *limit) for k, limit in zip(ks, limits, strict=True)] for ks in every_prefix(chooser)]
        longest = [ranks for ranks in prefixes if network_price(chooser, ranks, measure) <= budget][-1]
        plan = chosen(chooser, **{measure: budget}, align="auto")
        assert plan.align == "auto"
        assert getattr(plan, measure) == network_price(chooser, longest, measure) <= budget
        for i, cost in enumerate(chooser.costs):
            is_dense = price(cost, longest[i], measure)[1]
            assert plan.ranks[cost.name] == (chooser.upper[i] if is_dense else longest[i])


@pytest.mark.parametrize("measure", ["macs", "params"])
@some_networks
@given(chooser=wide_networks(), data=st.data())
def test_auto_plans_are_nested_and_possible_wherever_unrounded_ones_are(measure, chooser, data):
    with narrow_counts_as_wide():
        small, large = sorted(drawn_budget(chooser, measure, data) for _ in range(2))
        inner, outer = (chosen(chooser, **{measure: budget}, align="auto") for budget in (small, large))
        assert all(inner.ranks[name] <= outer.ranks[name] for name in inner.ranks)
        assert chooser.smallest_cost(measure, "auto") == chooser.smallest_cost(measure)
        whole = chooser.full_cost(measure)
        assert chosen(chooser, **{measure: whole}, align="auto") == chooser.plan_for(SizeRequest(**{measure: whole}))


@some_networks
@given(chooser=wide_networks(), ratio=st.floats(0.01, 1))
def test_a_ratio_is_taken_literally_unless_a_number_rounds_it(chooser, ratio):
    with narrow_counts_as_wide():
        literal = chosen(chooser, ratio=ratio)
        kept = prefix_ranks(chooser.scores, ratio, chooser.lower, chooser.upper)
        assert list(literal.ranks.values()) == kept.tolist()
        for align in (None, "auto", 1):
            plan = chosen(chooser, ratio=ratio, align=align)
            assert (plan, plan.align) == (literal, 1)
        assert chosen(chooser, ratio=ratio, align=4).align == 4


@pytest.mark.parametrize("measure", ["macs", "params"])
@some_networks
@given(chooser=wide_networks(), data=st.data())
def test_auto_is_the_default_and_a_part_of_a_network_has_the_plans_of_the_whole(measure, chooser, data):
    with narrow_counts_as_wide():
        small, large = sorted(drawn_budget(chooser, measure, data) for _ in range(2))
        largest = chosen(chooser, **{measure: large})
        assert largest == chosen(chooser, **{measure: large}, align=None) == chooser.of_size(large, measure, "auto")
        assert largest.align == "auto"
        ranks = chooser.as_array(largest.ranks)
        upper = np.where(ranks < chooser.full_ranks, ranks, chooser.upper)  # as `shrink` makes a part
        part = dataclasses.replace(chooser, lower=np.minimum(chooser.lower, upper), upper=upper, stored=ranks)
        inner = chosen(part, **{measure: small})
        assert inner == chosen(chooser, **{measure: small})
        assert all(inner.ranks[name] <= largest.ranks[name] for name in inner.ranks)


def test_given_ranks_stay_as_they_are_with_auto():
    chooser = selector(layer("a", 300, 300), layer("b", 300, 300))
    plan = chosen(chooser, ranks={"a": 97}, align="auto")
    assert (plan, plan.align) == (chosen(chooser, ranks={"a": 97}), 1)


def test_the_largest_size_of_a_network_that_lost_bases_stays_what_it_is_with_auto():
    whole = selector(layer("a", 300, 300))
    shrunk = dataclasses.replace(whole, upper=np.array([97]), stored=np.array([97]))
    assert chosen(shrunk, macs=1.0, align="auto") == shrunk.full_plan()


def test_a_plan_says_what_its_ranks_were_rounded_to():
    chooser = selector(layer("a", 300, 300))
    assert "multiples of 8" in str(chosen(chooser, macs=0.8, align=8))
    for align in (1, "auto", None):  # the default says nothing
        assert "rounded" not in str(chosen(chooser, macs=0.8, align=align))


# Ratios and given ranks are taken literally


@some_networks
@given(chooser=networks(), ratio=st.floats(0.01, 1))
def test_a_ratio_keeps_that_share_of_all_bases(chooser, ratio):
    prefixes = list(every_prefix(chooser))
    plan = chosen(chooser, ratio=ratio)
    assert list(plan.ranks.values()) == prefixes[round(ratio * (len(prefixes) - 1))]


def test_a_ratio_keeps_its_ranks_where_the_layer_is_dense():
    chooser = selector(layer("a", 10, 10), scores=[np.arange(10, 0, -1)])
    plan = chosen(chooser, ratio=0.8)
    assert (plan.ranks["a"], plan.dense, plan.params, plan.macs) == (8, {"a"}, 100, 100)
    assert plan.ratio == 0.8


def test_given_ranks_are_kept_and_the_other_layers_are_full():
    chooser = selector(layer("a", 10, 10), layer("b", 9, 9))
    plan = chosen(chooser, ranks={"a": 3})
    assert dict(plan.ranks) == {"a": 3, "b": 9}
    assert plan.dense == {"b"}
    assert plan.params == 3 * 20 + 81


@pytest.mark.parametrize(
    ("ranks", "came", "allowed"),
    [
        ({"typo": 1}, "typo", "'a'"),
        ({"a": 0}, 0, "an int, 1 to 10"),
        ({"a": 11}, 11, "an int, 1 to 10"),
        ({"a": 2.0}, 2.0, "an int, 1 to 10"),
        ({"a": True}, True, "an int, 1 to 10"),
        ([3], [3], "ranks by layer name, such as {'a': 1}"),
    ],
)
def test_wrong_ranks_are_refused_with_the_layer_and_what_is_allowed(ranks, came, allowed):
    with refused("ranks", came, allowed, layer="a" if "a" in ranks else None):
        chosen(selector(layer("a", 10, 10)), ranks=ranks)


@pytest.mark.parametrize("sizes", [{}, {"macs": 0.5, "params": 0.5}, {"ratio": 0.5, "ranks": {"a": 1}}])
def test_a_size_is_given_in_exactly_one_way(sizes):
    with pytest.raises(InvalidArgumentError) as caught:
        chosen(selector(layer("a", 10, 10)), **sizes)
    error = caught.value
    assert (error.option, error.came) == ("size", ", ".join(sizes) or "none")
    assert error.allowed == "exactly one of macs, params, ratio or ranks"


def test_an_unknown_keyword_is_refused_with_those_that_there_are():
    """As a TypeError too, which is what Python makes of it; with what else the function takes."""
    with pytest.raises(TypeError) as caught:
        SizeRequest.of("load", {"mac": 0.5}, "model")
    error = caught.value
    assert isinstance(error, InvalidArgumentError)
    assert (error.option, error.came) == ("mac", 0.5)
    assert error.allowed == "macs, params, ratio, ranks, latency_ms, align, batch, model"
    assert "\n" not in str(error)
    assert pickle.loads(pickle.dumps(error)).allowed == error.allowed


def test_the_keywords_are_those_of_the_request():
    """Both are written out, for type checkers."""
    assert list(SizeKeywords.__annotations__) == [field.name for field in dataclasses.fields(SizeRequest)]


def test_an_option_that_has_its_default_is_as_good_as_not_given():
    assert SizeRequest(align="auto", macs=None).given() == {}
    assert SizeRequest(align=1).given() == {"align": 1}


# The list of bases


def test_prefix_counts_the_best_bases_of_the_whole_network():
    scores = [np.array([9.0, 2.0, 1.0]), np.array([8.0, 7.0, 6.0])]
    ranks = prefix_ranks(scores, 4 / 6, np.array([1, 1]), np.array([3, 3]))
    assert ranks.tolist() == [1, 3]


@pytest.mark.parametrize(("ratio", "kept"), [(0.24, 2), (0.25, 2), (0.26, 3), (0.349, 3), (1.0, 10)])
def test_prefix_length_is_rounded_to_the_nearest(ratio, kept):
    assert prefix_ranks([np.arange(10.0, 0, -1)], ratio, np.array([1]), np.array([10])).tolist() == [kept]


def test_every_layer_is_raised_to_its_smallest_rank_and_cut_to_its_largest():
    scores = [np.array([9.0, 8, 7, 6]), np.array([0.4, 0.3, 0.2, 0.1])]
    assert prefix_ranks(scores, 0.5, np.array([1, 2]), np.array([3, 4])).tolist() == [3, 2]


# Limits


def test_min_rank_is_capped_at_the_full_rank():
    lower, upper = rank_limits(["a", "b"], [3, 10], 5, None)
    assert (lower.tolist(), upper.tolist()) == ([3, 5], [3, 10])


def test_limits_go_by_name_pattern_and_a_later_one_wins():
    names = ["stem", "layer1.conv", "layer2.conv"]
    limits = {"layer*": (4, 8), "layer2.*": (2, None), "stem": (None, 6)}
    lower, upper = rank_limits(names, [10, 10, 10], 3, limits)
    assert lower.tolist() == [3, 4, 2]
    assert upper.tolist() == [6, 8, 10]


def test_a_largest_rank_below_min_rank_wins_over_it():
    lower, upper = rank_limits(["a"], [10], 5, {"a": (None, 2)})
    assert (lower.tolist(), upper.tolist()) == ([2], [2])


def test_limits_beyond_the_full_rank_are_the_full_rank():
    lower, upper = rank_limits(["a"], [10], 1, {"a": (20, 30)})
    assert (lower.tolist(), upper.tolist()) == ([10], [10])


def test_a_pattern_that_matches_no_layer_is_a_typo():
    with refused("limits", "layr1"):
        rank_limits(["layer1", "layer2"], [4, 4], 1, {"layr1": (1, 2)})


@pytest.mark.parametrize("bounds", [(0, 3), (5, 3), (1.5, 3), (1, 2, 3), 4, "ab", (-1, None)])
def test_wrong_limits_are_refused_with_their_pattern(bounds):
    with refused("limits['a']", bounds):
        rank_limits(["a"], [10], 1, {"a": bounds})


@pytest.mark.parametrize("min_rank", [0, -1, 1.5, True, None, "1"])
def test_wrong_min_rank_is_refused(min_rank):
    with refused("min_rank", min_rank, "an int of at least 1"):
        rank_limits(["a"], [10], min_rank, None)


def test_limits_hold_under_every_budget():
    chooser = selector(layer("a", 10, 10), layer("b", 10, 10), limits={"a": (2, 3)})
    for params in range(chooser.smallest_cost("params"), 200):
        assert 2 <= chosen(chooser, params=params).ranks["a"] <= 3


# What a budget may be


def test_one_is_the_whole_network_as_int_and_as_float():
    assert absolute_budget("macs", 1, 1000) == absolute_budget("macs", 1.0, 1000) == 1000


def test_a_larger_int_is_an_absolute_count():
    assert absolute_budget("macs", 2, 1000) == 2
    assert absolute_budget("macs", np.int64(450), 1000) == 450


def test_a_float_is_a_fraction():
    assert absolute_budget("macs", 0.25, 1000) == 250
    assert absolute_budget("macs", np.float32(0.25), 1000) == 250


@pytest.mark.parametrize("value", [0, 0.0, -1, -0.5, 1.5, 2.0, True, False, math.nan, math.inf, "0.5"])
def test_other_budgets_are_refused(value):
    with refused("params", allowed=Saying(r"^a fraction in \(0, 1\]")) as caught:
        absolute_budget("params", value, 1000)
    assert caught.value.came is value


@pytest.mark.parametrize("total", [7, 100, 1311, 40_551_040])
def test_the_fraction_of_a_count_gives_that_count_back(total):
    """So that `resize_(macs=plan.macs_fraction)` is the plan again, and never one basis smaller."""
    counts = range(1, total + 1, max(1, total // 997))
    assert [c for c in counts if absolute_budget("macs", c / total, total) != c] == []


@pytest.mark.parametrize("value", [0, 1.1, -0.1, True, "0.5", None, float("nan")])
def test_a_ratio_lies_between_0_and_1(value):
    with refused("ratio", allowed="a number in (0, 1]") as caught:
        check_ratio("ratio", value)
    assert caught.value.came is value


# The plan


@pytest.fixture
def plan():
    chooser = selector(layer("stem", 10, 10), layer("block.conv", 12, 9), fixed_macs=5, fixed_params=5)
    return chosen(chooser, params=0.7)


def test_a_plan_cannot_be_changed(plan):
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.macs = 3


@pytest.mark.parametrize(
    "change",
    [
        lambda ranks: ranks.__setitem__("stem", 1),
        lambda ranks: ranks.__delitem__("stem"),
        lambda ranks: ranks.update(stem=1),
        lambda ranks: ranks.pop("stem"),
        lambda ranks: ranks.popitem(),
        lambda ranks: ranks.clear(),
        lambda ranks: ranks.setdefault("new", 1),
        lambda ranks: ranks.__ior__({"stem": 1}),
    ],
)
def test_the_ranks_of_a_plan_cannot_be_changed(plan, change):
    before = dict(plan.ranks)
    with pytest.raises(TypeError, match="new plan"):
        change(plan.ranks)
    assert dict(plan.ranks) == before


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_plan_can_be_copied_and_pickled(plan, duplicate):
    twin = duplicate(plan)
    assert twin == plan
    assert hash(twin) == hash(plan)
    with pytest.raises(TypeError):
        twin.ranks["stem"] = 1


def test_equal_ranks_have_equal_hashes_in_any_order(plan):
    kind = type(plan.ranks)
    assert kind(a=1, b=2) == kind(b=2, a=1)
    assert hash(kind(a=1, b=2)) == hash(kind(b=2, a=1))


def test_a_plan_has_plain_ints_for_every_layer(plan):
    assert {type(rank) for rank in plan.ranks.values()} == {int}
    assert type(plan.macs) is type(plan.params) is int
    assert plan.params_fraction == plan.params / 213
    assert plan.macs_fraction == plan.macs / 213
    assert not plan.is_full


def test_a_plan_prints_as_a_table_with_a_line_for_every_layer(plan):
    lines = str(plan).splitlines()
    for name, rank in plan.ranks.items():
        (row,) = [line for line in lines if line.startswith(name)]
        runs_as = "dense" if name in plan.dense else "two factors"
        assert row.split()[1:] == [str(rank), str(plan.full_ranks[name]), *runs_as.split()]
    assert f"{plan.params:,} parameters" in lines[-1]
    assert f"{plan.macs:,} MACs" in lines[-1]


def test_a_plan_without_macs_prints_too():
    text = str(chosen(selector(layer("a", 10, 10), fixed_macs=None), params=0.5))
    assert "MACs" not in text
    assert "parameters" in text


def test_choosing_ranks_needs_no_torch():
    """A device without PyTorch sizes networks with this code."""
    code = "import sys, decomposable_edge.sizing.ranks, decomposable.core.criteria; print('torch' in sys.modules)"
    source = str(Path(decomposable.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
