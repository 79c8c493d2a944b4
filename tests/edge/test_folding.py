"""Batch normalisation folded in numpy, against PyTorch's layers."""

import numpy as np
import pytest
import torch
from torch import nn

from decomposable_edge.building import folded


def norm_of(layer):
    parts = {"gamma": layer.weight, "beta": layer.bias, "mean": layer.running_mean, "var": layer.running_var}
    return {name: tensor.detach().numpy() for name, tensor in parts.items()} | {"epsilon": layer.eps}


def random_norm(kind, channels):
    layer = kind(channels, eps=1e-3).double().eval()
    for tensor in (layer.weight.data, layer.bias.data, layer.running_mean):
        tensor.copy_(torch.randn(channels))
    layer.running_var.copy_(torch.rand(channels) + 0.1)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_into_a_convolution(bias, groups):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(6, 9, 3, groups=groups, bias=bias).double(), random_norm(nn.BatchNorm2d, 9)
    x = torch.randn(2, 6, 7, 7).double()
    weight, shift = folded(conv.weight.detach().numpy(), conv.bias.detach().numpy() if bias else None, **norm_of(norm))
    together = torch.conv2d(x, torch.from_numpy(weight), torch.from_numpy(shift), groups=groups)
    np.testing.assert_allclose(together.numpy(), norm(conv(x)).detach().numpy(), rtol=1e-12, atol=1e-12)


def test_into_a_linear_layer_of_any_type():
    torch.manual_seed(0)
    linear, norm = nn.Linear(5, 4).double(), random_norm(nn.BatchNorm1d, 4)
    x = torch.randn(3, 5).double()
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 1e-2)):
        parts = (linear.weight.detach().numpy().astype(dtype), linear.bias.detach().numpy().astype(dtype))
        weight, shift = folded(*parts, **norm_of(norm))
        assert weight.dtype == shift.dtype == dtype
        found = x.numpy() @ weight.T + shift
        np.testing.assert_allclose(found, norm(linear(x)).detach().numpy(), rtol=tolerance, atol=tolerance)


def test_a_slice_of_a_factor_comes_back_in_one_piece():
    whole = np.ones((4, 6, 3, 1), np.float32)
    ones = np.ones(4, np.float32)
    weight, _ = folded(whole[:, :2], None, gamma=ones, beta=ones, mean=ones, var=ones, epsilon=0.0)
    assert weight.flags.c_contiguous
    assert weight.shape == (4, 2, 3, 1)
    assert (whole == 1).all()
