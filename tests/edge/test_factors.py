"""Slices and dense weights in numpy, against the decomposition in PyTorch."""

import numpy as np
import pytest
import torch

from decomposable.core.forms import first_weight, matrix_shape, second_weight, to_matrix, to_weight
from decomposable.core.svd import svd
from decomposable_edge.weights import LayerWeights, dense_weight

SHAPES = [((8, 4, 3, 5), "spatial"), ((8, 4, 3, 5), "channel"), ((6, 5, 1, 1), "channel"), ((7, 9), "channel")]


def factors(shape, form):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    u, s, v = svd({"w": to_matrix(weight, form)})["w"]
    return weight, u, s, v


@pytest.mark.parametrize(("shape", "form"), SHAPES)
def test_dense_weights_are_those_of_the_truncated_decomposition(shape, form):
    weight, u, s, v = factors(shape, form)
    first, second = first_weight(u * s.sqrt(), shape, form), second_weight((v * s.sqrt()).mT, shape, form)
    layer = LayerWeights(name="w", form=form, shape=shape, weights=(first.numpy(), second.numpy()))
    assert tuple(each.shape for each in layer.weights) == layer.chain.shapes((len(s),))
    assert layer.stored == (layer.full_rank,) == (min(matrix_shape(shape, form)),)
    np.testing.assert_allclose(layer.dense(layer.stored, keep=False), weight.numpy(), rtol=1e-10, atol=1e-12)
    for rank in range(1, layer.full_rank):
        truncated = to_weight((u[:, :rank] * s[:rank]) @ v[:, :rank].mT, shape, form).numpy()
        made = layer.dense((rank,), keep=False)
        assert made.flags.c_contiguous
        np.testing.assert_allclose(made, truncated, rtol=1e-10, atol=1e-12)
        for part, whole in zip(layer.slices((rank,)), layer.weights, strict=True):
            assert np.shares_memory(part, whole)


def test_one_dense_weight_is_kept_for_each_layer():
    random = np.random.default_rng(0)
    first, second = random.random((3, 4)), random.random((5, 3))
    layer = LayerWeights(name="w", form="channel", shape=(5, 4), weights=(first, second))
    kept = layer.dense((3,), keep=True)
    assert layer.dense((3,), keep=True) is kept
    assert layer.dense((2,), keep=False) is not layer.dense((2,), keep=False)
    assert layer.dense((3,), keep=True) is kept


def test_half_precision_is_multiplied_in_single():
    random = np.random.default_rng(0)
    first, second = (random.standard_normal(shape).astype(np.float16) for shape in ((64, 32), (16, 64)))
    made = dense_weight((first, second))
    assert made.dtype == np.float16
    np.testing.assert_allclose(made, second.astype(np.float64) @ first.astype(np.float64), rtol=1e-3, atol=1e-2)
