import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposable.core.forms import FORMS, matrix_shape
from decomposable_edge.sizing.cost import LayerCost, chain_is_faster

some_shapes = settings(deadline=None, derandomize=True, max_examples=40)
conv_shapes = st.tuples(st.integers(1, 64), st.integers(1, 64), st.integers(1, 5), st.integers(1, 5))
forms = st.sampled_from(["channel", "spatial"])


@some_shapes
@given(shape=conv_shapes, form=forms, rank=st.integers(1, 9))
def test_factor_sizes_count_the_weights_of_the_two_layers(shape, form, rank):
    rows, columns = matrix_shape(shape, form)
    factors = torch.empty(rows, rank, device="meta"), torch.empty(rank, columns, device="meta")
    first, second = FORMS[form].stages_of(*factors, shape)
    per_basis = FORMS[form].chain(shape).sizes
    assert (rank * per_basis[0], rank * per_basis[1]) == (first.numel(), second.numel())


@pytest.mark.parametrize("shape", [(10, 64), (8, 4, 3, 5), (1, 1)])
def test_dense_size_counts_the_weights_of_the_layer(shape):
    assert FORMS["channel"].chain(shape).dense_size == torch.empty(shape, device="meta").numel()


def test_a_layer_costs_its_rank_in_two_factors_and_the_same_at_any_rank_when_dense():
    cost = LayerCost(name="conv", full_rank=8, dense_macs=1000, macs_per_rank=150, dense_params=96, params_per_rank=20)
    assert (cost.macs(3, dense=False), cost.params(3, dense=False)) == (450, 60)
    assert (cost.macs(3, dense=True), cost.params(3, dense=True)) == (1000, 96)


positions = {"inputs": 256, "maps": (256, 256), "samples": 128}


def is_faster(shape, form, rank, **positions):
    return chain_is_faster(FORMS[form].chain(shape), (rank,), **positions)


def test_a_small_rank_of_a_wide_layer_is_faster_in_two_factors():
    assert is_faster((512, 512, 3, 3), "spatial", 16, **positions)
    assert is_faster((2048, 2048), "channel", 16, inputs=1, maps=(1, 1), samples=128)


def test_a_narrow_layer_is_not():
    assert not is_faster((16, 3, 3, 3), "channel", 8, **positions)


@some_shapes
@given(shape=conv_shapes, form=forms)
def test_factors_with_more_multiplications_than_dense_are_never_faster(shape, form):
    rows, columns = matrix_shape(shape, form)
    break_even = -(-rows * columns // (rows + columns))  # rounded up
    assert not is_faster(shape, form, break_even, **(positions | {"samples": 4096}))


@some_shapes
@given(shape=conv_shapes, form=forms)
def test_what_is_slower_at_some_rank_is_slower_at_every_larger_one(shape, form):
    ranks = range(1, min(matrix_shape(shape, form)) + 1)
    faster = [is_faster(shape, form, rank, **positions) for rank in ranks]
    assert faster == sorted(faster, reverse=True)
