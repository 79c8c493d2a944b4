"""Slices and dense weights in numpy, against the decomposition in PyTorch."""

import numpy as np
import pytest
import torch
from sealing import write_arrays

from decomposable.core.forms import matrix_form, matrix_shape, to_matrix, to_weight
from decomposable.core.svd import svd
from decomposable_edge import realising
from decomposable_edge.file.container import Container, InNumpy
from decomposable_edge.network import LayerWeights, dense_weight

SHAPES = [((8, 4, 3, 5), "spatial"), ((8, 4, 3, 5), "channel"), ((6, 5, 1, 1), "channel"), ((7, 9), "channel")]


def stored_layer(folder, *, arrays, **layer):
    write_arrays(folder / "file", {}, arrays)
    first, second, weight = (Container(folder / "file", InNumpy()).tensors[name] for name in arrays)
    return LayerWeights(**layer, stages_stored=(first, second), dense_stored=weight)


def factors(shape, form):
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=torch.float64)
    u, s, v = svd({"w": to_matrix(weight, form)})["w"]
    return weight, u, s, v


@pytest.mark.parametrize(("shape", "form"), SHAPES)
def test_dense_weights_are_those_of_the_truncated_decomposition(shape, form, tmp_path):
    weight, u, s, v = factors(shape, form)
    first, second = matrix_form(form).stages_of(u * s.sqrt(), (v * s.sqrt()).mT, shape)
    stages = {"first": first.numpy(), "second": second.numpy().swapaxes(0, 1)}
    layer = stored_layer(tmp_path, name="w", form=form, shape=shape, arrays={**stages, "weight": weight.numpy()})
    assert tuple(each.shape for each in layer.first(layer.kept)) == layer.chain.shapes((len(s),))
    assert layer.kept == (layer.full_rank,) == (min(matrix_shape(shape, form)),)
    np.testing.assert_allclose(layer.joined(layer.first(layer.kept)), weight.numpy(), rtol=1e-10, atol=1e-12)
    for rank in range(1, layer.full_rank):
        truncated = to_weight((u[:, :rank] * s[:rank]) @ v[:, :rank].mT, shape, form).numpy()
        made = realising.dense_weight(layer, (rank,))
        assert made.flags.c_contiguous
        np.testing.assert_allclose(made, truncated, rtol=1e-10, atol=1e-12)
        for part, whole in zip(layer.first((rank,)), layer.first(layer.kept), strict=True):
            assert np.shares_memory(part, whole)


def test_the_dense_weight_is_read_once_and_kept(tmp_path):
    random = np.random.default_rng(0)
    arrays = {"first": random.random((3, 4)), "second": random.random((3, 5)), "weight": random.random((5, 4))}
    layer = stored_layer(tmp_path, name="w", form="channel", shape=(5, 4), arrays=arrays)
    np.testing.assert_array_equal(layer.weight(), arrays["weight"])
    assert layer.weight() is layer.weight() is realising.dense_weight(layer, layer.kept)


def test_half_precision_is_multiplied_in_single():
    random = np.random.default_rng(0)
    first, second = (random.standard_normal(shape).astype(np.float16) for shape in ((64, 32), (16, 64)))
    made = dense_weight((first, second))
    assert made.dtype == np.float16
    np.testing.assert_allclose(made, second.astype(np.float64) @ first.astype(np.float64), rtol=1e-3, atol=1e-2)
