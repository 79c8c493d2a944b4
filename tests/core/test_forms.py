import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposable.core.forms import (
    check_form,
    form_for,
    matrix_form,
    matrix_shape,
    to_factors,
    to_matrix,
    to_weight,
)
from refusals import refused

some_shapes = settings(deadline=None, derandomize=True, max_examples=40)
forms = st.sampled_from(["channel", "spatial"])
channels, extents = st.integers(1, 6), st.integers(1, 5)
conv_shapes = st.tuples(channels, channels, extents, extents)
linear_shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@some_shapes
@given(shape=conv_shapes, form=forms)
def test_conv_weight_to_matrix_and_back_is_exact(shape, form):
    weight = random(*shape)
    assert torch.equal(to_weight(to_matrix(weight, form), shape, form), weight)


@some_shapes
@given(shape=linear_shapes)
def test_linear_weight_to_matrix_and_back_is_exact(shape):
    weight = random(*shape)
    assert torch.equal(to_weight(to_matrix(weight, "channel"), shape, "channel"), weight)


@some_shapes
@given(shape=conv_shapes, form=forms)
def test_matrix_to_weight_and_back_is_exact(shape, form):
    matrix = random(*matrix_shape(shape, form))
    assert torch.equal(to_matrix(to_weight(matrix, shape, form), form), matrix)


@pytest.mark.parametrize("form", ["channel", "spatial"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_and_the_dtype_survive(form, dtype):
    weight = random(4, 3, 3, 2).to(dtype)
    back = to_weight(to_matrix(weight, form), weight.shape, form)
    assert back.dtype == dtype
    assert torch.equal(back, weight)


@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_channels_last_weight_to_matrix_and_back_is_exact(form):
    weight = random(4, 3, 3, 2).to(memory_format=torch.channels_last)
    assert torch.equal(to_weight(to_matrix(weight, form), weight.shape, form), weight)


@some_shapes
@given(shape=conv_shapes, form=forms)
def test_matrix_shape_foretells_the_matrix(shape, form):
    assert to_matrix(random(*shape), form).shape == matrix_shape(shape, form)


def test_linear_matrix_is_the_transposed_weight_so_that_y_is_w_transposed_x():
    weight, x = random(3, 5), random(5)
    torch.testing.assert_close(to_matrix(weight, "channel").T @ x, F.linear(x, weight))


@some_shapes
@given(shape=conv_shapes)
def test_channel_matrix_multiplies_unfolded_patches(shape):
    weight, image = random(*shape), random(2, shape[1], 6, 7)
    patches = F.unfold(image, shape[2:])  # batch, I·H·W, positions
    product = to_matrix(weight, "channel").T @ patches
    torch.testing.assert_close(product, F.conv2d(image, weight).flatten(2))


@some_shapes
@given(shape=conv_shapes)
def test_spatial_matrix_of_a_separable_kernel_has_rank_one(shape):
    horizontal, vertical = random(shape[1], shape[3]), random(shape[0], shape[2])
    weight = torch.einsum("iw,oh->oihw", horizontal, vertical)
    assert torch.linalg.matrix_rank(to_matrix(weight, "spatial"), rtol=1e-9) == 1


@some_shapes
@given(shape=conv_shapes)
def test_spatial_matrix_has_input_channels_and_columns_in_its_rows(shape):
    """Changing one input channel in one kernel column changes one row only."""
    weight = random(*shape)
    other = weight.clone()
    other[:, -1, :, -1] += 1
    changed = (to_matrix(weight, "spatial") != to_matrix(other, "spatial")).any(dim=1)
    assert changed.sum() == 1


@some_shapes
@given(shape=conv_shapes, form=forms, rank=st.integers(1, 4))
def test_two_convolutions_one_after_the_other_apply_the_product(shape, form, rank):
    rows, columns = matrix_shape(shape, form)
    p, q = random(rows, rank), random(rank, columns)
    image = random(2, shape[1], 6, 7)
    first, second = matrix_form(form).stages_of(p, q, shape)
    two = F.conv2d(F.conv2d(image, first), second)
    torch.testing.assert_close(two, F.conv2d(image, to_weight(p @ q, shape, form)), rtol=1e-10, atol=1e-10)


@some_shapes
@given(shape=linear_shapes, rank=st.integers(1, 4))
def test_two_linear_layers_one_after_the_other_apply_the_product(shape, rank):
    p, q = random(shape[1], rank), random(rank, shape[0])
    x = random(3, shape[1])
    first, second = matrix_form("channel").stages_of(p, q, shape)
    two = F.linear(F.linear(x, first), second)
    torch.testing.assert_close(two, F.linear(x, to_weight(p @ q, shape, "channel")), rtol=1e-10, atol=1e-10)


@some_shapes
@given(shape=st.one_of(conv_shapes, linear_shapes), form=forms, rank=st.integers(1, 4))
def test_factors_to_two_weights_and_back_is_exact(shape, form, rank):
    form = form_for(shape, form)
    rows, columns = matrix_shape(shape, form)
    p, q = random(rows, rank), random(rank, columns)
    again = to_factors(*matrix_form(form).stages_of(p, q, shape))
    assert torch.equal(again[0], p)
    assert torch.equal(again[1], q)


def test_channel_factors_are_a_full_kernel_then_a_pointwise_one():
    shape = (8, 4, 3, 5)
    first, second = matrix_form("channel").stages_of(random(60, 2), random(2, 8), shape)
    assert (first.shape, second.shape) == ((2, 4, 3, 5), (8, 2, 1, 1))


def test_spatial_factors_are_a_horizontal_kernel_then_a_vertical_one():
    shape = (8, 4, 3, 5)
    first, second = matrix_form("spatial").stages_of(random(20, 2), random(2, 24), shape)
    assert (first.shape, second.shape) == ((2, 4, 1, 5), (8, 2, 3, 1))


@pytest.mark.parametrize("shape", [(8, 4, 1, 1), (8, 4)])
@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_pointwise_kernels_and_linear_layers_always_take_the_channel_form(shape, form):
    assert form_for(shape, form) == "channel"


@pytest.mark.parametrize("shape", [(8, 4, 3, 3), (8, 4, 1, 3), (8, 4, 3, 1)])
@pytest.mark.parametrize("form", ["channel", "spatial"])
def test_other_kernels_take_the_form_asked_for(shape, form):
    assert form_for(shape, form) == form


def test_known_forms_pass_the_check():
    assert [check_form("channel"), check_form("spatial")] == ["channel", "spatial"]


@pytest.mark.parametrize("form", ["Spatial", "", None, 3])
def test_unknown_form_is_refused_in_one_line_with_what_is_allowed(form):
    with refused("form", form, "'channel', 'spatial', 'tucker'"):
        check_form(form)
