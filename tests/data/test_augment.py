import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decomposable.data import augment
from decomposable.data.augment import FlipJitterLighting, PadCropFlip, Standardise

few = settings(max_examples=50, deadline=None, derandomize=True)
CIFAR = Standardise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count, height, width, channels=3, seed=0):
    return torch.randint(0, 256, (count, channels, height, width), generator=seeded(seed), dtype=torch.uint8)


def test_standardise_is_the_formula_and_leaves_its_input_alone():
    x = images(4, 5, 6)
    expected = (x.double() / 255 - torch.tensor(CIFAR.mean).view(3, 1, 1)) / torch.tensor(CIFAR.std).view(3, 1, 1)
    for given_ in (x, x.float()):
        before = given_.clone()
        torch.testing.assert_close(CIFAR(given_), expected.float())
        assert torch.equal(given_, before)


@few
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.integers(0, 2**31))
def test_every_crop_is_the_window_that_was_drawn(count, height, width, padding, seed):
    x = images(count, height, width, seed=seed)
    cropped = augment.pad_and_crop(x, padding, seeded(seed))
    dy, dx = torch.randint(0, 2 * padding + 1, (2, count), generator=seeded(seed)).tolist()
    for image, crop, top, left in zip(x.numpy(), cropped.numpy(), dy, dx, strict=True):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        np.testing.assert_array_equal(crop, padded[:, top : top + height, left : left + width])
    assert cropped.dtype == torch.uint8


def test_all_places_of_a_crop_are_equally_likely():
    x = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3).expand(40_500, 1, 3, 3)
    corners = augment.pad_and_crop(x, 1, seeded())[:, 0, 1, 1]  # tells the place
    counts = corners.bincount(minlength=10)[1:]
    assert counts.min() > 4500 - 5 * 67  # five deviations
    assert counts.max() < 4500 + 5 * 67


def test_padded_pixels_are_black_and_not_of_the_mean_colour():
    """Black, standardised, is −mean/std."""
    x = torch.full((200, 3, 8, 8), 255, dtype=torch.uint8)
    augmented = PadCropFlip(CIFAR)(x, seeded())
    black, white = (CIFAR(torch.full((1, 3, 1, 1), value)) for value in (0.0, 255.0))
    torch.testing.assert_close(black.flatten(), -torch.tensor(CIFAR.mean) / torch.tensor(CIFAR.std))
    is_black, is_white = ((augmented - colour).abs() < 1e-6 for colour in (black, white))
    assert bool((is_black | is_white).all())
    assert 0.1 < float(is_black.float().mean()) < 0.9


def test_flips_are_exact_and_half_of_all():
    x = images(10_000, 2, 3)
    flipped = augment.random_flip(x, seeded())
    is_flipped = (flipped == x.flip(3)).flatten(1).all(1)
    assert bool((is_flipped | (flipped == x).flatten(1).all(1)).all())
    assert int(is_flipped.sum()) == pytest.approx(5000, abs=5 * 50)


def naive_jitter(image, factors, order):
    """As torchvision documents it, one image at a time: image is 3 × H × W from 0 to 255."""

    def grey(image):
        return 0.299 * image[0] + 0.587 * image[1] + 0.114 * image[2]

    def blend(image, other, factor):
        return np.clip(factor * image + (1 - factor) * other, 0, 255)

    for kind in order:
        if kind == 0:
            image = blend(image, np.zeros_like(image), factors[0])
        elif kind == 1:
            image = blend(image, np.full_like(image, grey(image).mean()), factors[1])
        else:
            image = blend(image, np.broadcast_to(grey(image), image.shape), factors[2])
    return image


def drawn(count, strength, seed):
    """The factors and orders, drawn as colour_jitter_ does."""
    generator = seeded(seed)
    factors = 1 + strength * (2 * torch.rand(count, 3, generator=generator) - 1)
    return factors, torch.rand(count, 3, generator=generator).argsort(1)


@few
@given(
    st.integers(1, 12), st.integers(1, 6), st.integers(1, 6), st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 2**31)
)
def test_colour_jitter_is_the_published_formula_image_by_image(count, height, width, strength, seed):
    x = images(count, height, width, seed=seed).float()
    factors, orders = drawn(count, strength, seed)
    expected = [
        naive_jitter(*one) for one in zip(x.double().numpy(), factors.double().numpy(), orders.tolist(), strict=True)
    ]
    augment.colour_jitter_(x, strength, seeded(seed))
    np.testing.assert_allclose(x.numpy(), np.stack(expected), atol=1e-3)


def test_colour_jitter_is_pillows_within_rounding():
    enhance = pytest.importorskip("PIL.ImageEnhance", reason="Pillow is not installed")
    from PIL import Image

    x = images(24, 20, 30)
    x = (x.float() * 0.6 + 50).to(torch.uint8)
    factors, orders = drawn(24, 0.4, 3)
    jittered = augment.colour_jitter_(x.float(), 0.4, seeded(3))
    for pixels, factor, order, mine in zip(x, factors.tolist(), orders.tolist(), jittered, strict=True):
        image = Image.fromarray(pixels.permute(1, 2, 0).numpy())
        for kind in order:
            image = (enhance.Brightness, enhance.Contrast, enhance.Color)[kind](image).enhance(factor[kind])
        difference = np.abs(np.asarray(image).transpose(2, 0, 1) - mine.numpy())
        assert difference.max() < 4.5  # three roundings to whole grey values, amplified by up to 1.4 each


def test_factors_are_uniform_and_orders_equally_likely():
    factors, orders = drawn(60_000, 0.4, 0)
    assert 0.6 <= float(factors.min()) < 0.601 < 1.399 < float(factors.max()) <= 1.4
    torch.testing.assert_close(factors.mean(0), torch.ones(3), atol=0.005, rtol=0)
    names, counts = orders.unique(dim=0, return_counts=True)
    assert names.tolist() == sorted(map(list, itertools.permutations(range(3))))
    assert counts.min() > 10_000 - 5 * 92  # five deviations
    assert counts.max() < 10_000 + 5 * 92


def test_lighting_is_the_published_formula():
    x = images(6, 4, 5).float()
    alpha = 0.1 * torch.randn(6, 3, generator=seeded(5)).double().numpy()
    eigenvalues, eigenvectors = np.array(augment.EIGENVALUES), np.array(augment.EIGENVECTORS)
    expected = np.stack([
        image / 255 + (eigenvectors @ (a * eigenvalues))[:, None, None]
        for image, a in zip(x.double().numpy(), alpha, strict=True)
    ])  # fmt: skip
    augment.lighting_(x, 0.1, seeded(5))
    np.testing.assert_allclose(x.numpy() / 255, expected, atol=1e-6)


def test_the_eigenvectors_are_orthonormal():
    vectors = np.array(augment.EIGENVECTORS)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(3), atol=2e-4)


def test_all_of_imagenets_in_one():
    x = images(8, 6, 7)
    standardise = Standardise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    result = FlipJitterLighting(standardise)(x, seeded(2))
    generator = seeded(2)
    expected = augment.random_flip(x, generator).float()
    expected = augment.lighting_(augment.colour_jitter_(expected, 0.4, generator), 0.1, generator)
    torch.testing.assert_close(result, standardise(expected))
    assert torch.equal(x, images(8, 6, 7))  # the input is as it was
    still = FlipJitterLighting(standardise, strength=0, lighting_std=0)(x, seeded(2))
    torch.testing.assert_close(still, standardise(augment.random_flip(x, seeded(2))))


@pytest.mark.parametrize(
    "augmentation", [PadCropFlip(CIFAR), FlipJitterLighting(CIFAR)], ids=lambda a: type(a).__name__
)
def test_only_the_generator_that_is_handed_in_counts(augmentation):
    x = images(10, 8, 8)
    before = torch.get_rng_state()
    first = augmentation(x, seeded(1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(augmentation(x, seeded(1)), first)
    assert not torch.equal(augmentation(x, seeded(2)), first)


def boxes_of(width, height, count=20_000, **kwargs):
    return augment.random_boxes(torch.tensor([width, height]).expand(count, 2), seeded(), **kwargs)


def test_boxes_have_the_areas_and_aspects_of_the_published_algorithm():
    """Against torchvision's loop, one image at a time, by the quantiles of what comes out."""
    rng = np.random.default_rng(0)

    def naive(width, height):
        for _ in range(10):
            area = width * height * rng.uniform(0.08, 1)
            aspect = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                left, top = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
                return left, top, left + w, top + h
        raise AssertionError  # improbable for this size

    mine = boxes_of(500, 375).double().numpy()
    theirs = np.array([naive(500, 375) for _ in range(20_000)], dtype=float)
    for property_ in (
        lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) / (500 * 375),  # area
        lambda b: np.log((b[:, 2] - b[:, 0]) / (b[:, 3] - b[:, 1])),  # aspect
        lambda b: (b[:, 0] + b[:, 2]) / 1000,  # centre
        lambda b: (b[:, 1] + b[:, 3]) / 750,
    ):
        quantiles = np.linspace(0.05, 0.95, 19)
        difference = np.quantile(property_(mine), quantiles) - np.quantile(property_(theirs), quantiles)
        assert np.abs(difference).max() < 0.02


def test_on_a_square_that_is_large_areas_are_uniform_until_they_do_not_fit():
    boxes = boxes_of(10_000, 10_000, scale=(0.08, 0.5)).double()  # 0.5 · 4/3 < 1: every box fits
    width, height = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    area, log_aspect = width * height / 1e8, (width / height).log()
    for values, low, high in ((area, 0.08, 0.5), (log_aspect, math.log(3 / 4), math.log(4 / 3))):
        ordered = ((values.sort().values - low) / (high - low)).clamp(0, 1)
        uniform = (torch.arange(len(values)) + 0.5) / len(values)
        assert float((ordered - uniform).abs().max()) < 0.015  # Kolmogorov's distance


@few
@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=20), st.integers(0, 2**31))
def test_boxes_are_whole_pixels_within_the_image(sizes, seed):
    sizes = torch.tensor(sizes)
    boxes = augment.random_boxes(sizes, seeded(seed))
    assert boxes.dtype == torch.int64
    assert bool((boxes[:, :2] >= 0).all())
    assert bool((boxes[:, 2:] <= sizes).all())
    assert bool((boxes[:, 2:] > boxes[:, :2]).all())


@pytest.mark.parametrize(
    ("width", "height", "box"),
    [
        (1000, 10, (493, 0, 506, 10)),  # too wide: 10 · 4/3
        (10, 1000, (0, 493, 10, 506)),  # too high: 10 / (3/4)
        (30, 30, (0, 0, 30, 30)),
        (1, 1, (0, 0, 1, 1)),
    ],
)
def test_where_no_try_fits_the_middle_is_taken(width, height, box):
    """The areas are far too large, so that no try can."""
    assert boxes_of(width, height, 3, scale=(50, 60)).tolist() == [list(box)] * 3


@few
@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 64), st.integers(0, 32))
def test_the_central_box_is_in_the_middle(width, height, size, more):
    left, top, right, bottom = augment.central_box(width, height, resize=size + more, size=size)
    assert -1e-9 <= left < right <= width + 1e-6
    assert -1e-9 <= top < bottom <= height + 1e-6
    pixel = min(width, height) / (size + more)
    assert abs(left + right - width) <= 2 * pixel
    assert abs(top + bottom - height) <= 2 * pixel
