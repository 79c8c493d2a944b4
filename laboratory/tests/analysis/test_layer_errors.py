"""Errors of cut layers, against layers that are really cut."""

import numpy as np
import pytest
import torch
from torch import nn

import decomposable_lab as lab
from decomposable.core.forms import to_matrix, to_weight
from decomposable_edge.errors import InvalidArgumentError

X = torch.randn(5, 6, 9, 8, generator=torch.Generator().manual_seed(0))


def seeded(build, seed=0):
    torch.manual_seed(seed)
    return build()


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(6, 4, 3),
    "padded": lambda: nn.Conv2d(6, 4, 3, padding=1),
    "strided": lambda: nn.Conv2d(6, 10, 3, stride=2, padding=1),
    "uneven": lambda: nn.Conv2d(6, 7, (5, 2), stride=(3, 1), padding=(2, 0)),
    "dilated": lambda: nn.Conv2d(6, 4, 3, dilation=2, padding="same"),
    "reflecting": lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
    "pixels": lambda: nn.Conv2d(6, 4, 1),
}


def cut(module, form, rank):
    """A twin of the layer with W̃, through LAPACK."""
    weight = module.weight.detach().double()
    u, s, vt = torch.linalg.svd(to_matrix(weight, form), full_matrices=False)
    low = (u[:, :rank] * s[:rank]) @ vt[:rank]
    return to_weight(low, weight.shape, form)


def applied(module, x, weight):
    if isinstance(module, nn.Linear):
        return nn.functional.linear(x.double(), weight)
    return module._conv_forward(x.double(), weight, None)


@pytest.mark.parametrize("form", ["channel", "spatial"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_errors_are_those_of_layers_that_are_cut(kind, form):
    module = seeded(CONVOLUTIONS[kind])
    found = lab.analysis.errors_by_rank(nn.Sequential(module), [X[:3], X[3:]], form=form)["0"]
    whole = applied(module, X, module.weight.double())
    assert found.energy == pytest.approx(whole.detach().square().flatten(1).sum(1).numpy(), rel=1e-9)
    assert found.output.shape == (5, len(found.params))
    for rank in range(found.output.shape[1]):
        error = (whole - applied(module, X, cut(module, found.form, rank))).detach().square().flatten(1).sum(1)
        assert found.output[:, rank] == pytest.approx(error.numpy(), rel=1e-7, abs=1e-9)
    assert found.rises_before_taps == 0
    if found.form == "channel":
        assert found.rises == 0
        assert np.array_equal(found.output, found.before_taps)


def test_linear_layers_with_several_rows_per_sample():
    module = seeded(lambda: nn.Linear(8, 5))
    x = torch.randn(4, 7, 8)
    found = lab.analysis.errors_by_rank(nn.Sequential(module), [x])["0"]
    whole = applied(module, x, module.weight.double()).detach()
    for rank in range(6):
        error = (whole - applied(module, x, cut(module, "channel", rank))).detach().square().flatten(1).sum(1)
        assert found.output[:, rank] == pytest.approx(error.numpy(), rel=1e-7, abs=1e-9)
    assert found.params.tolist() == [13 * rank for rank in range(6)]
    assert found.relative[0] == pytest.approx(1.0)
    assert found.relative[-1] == pytest.approx(0.0, abs=1e-12)


def test_before_the_taps_the_error_is_that_of_every_row_and_behind_them_it_can_rise():
    """Of a kernel of three rows, what the horizontal patches of a row add to three rows of the output."""
    module = seeded(lambda: nn.Conv2d(16, 16, 3, padding=1, bias=False))
    images = torch.rand(5, 16, 1, 1).expand(-1, -1, 9, 9)  # rows alike, so that taps can cancel
    found = lab.analysis.errors_by_rank(nn.Sequential(module), [images], form="spatial")["0"]
    matrix = to_matrix(module.weight.detach().double(), "spatial")
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    padded = nn.functional.pad(images.double(), (1, 1, 1, 1))
    patches = nn.functional.unfold(padded, (1, 3))
    for rank in (0, 3, 7):
        lost = ((u[:, rank:] * s[rank:]) @ vt[rank:]).mT @ patches
        assert found.before_taps[:, rank] == pytest.approx(lost.square().sum((1, 2)).numpy(), rel=1e-7)
    assert found.rises > 0  # the proposition is of matrix products


def test_blocks_of_bases_give_the_same(monkeypatch):
    module = seeded(CONVOLUTIONS["strided"])
    whole = lab.analysis.errors_by_rank(nn.Sequential(module), [X])["0"]
    monkeypatch.setattr("decomposable_lab.analysis.layer_errors._MOST", 1000)
    assert lab.analysis.errors_by_rank(nn.Sequential(module), [X])["0"].output == pytest.approx(whole.output, rel=1e-9)


def test_widths_keep_the_first_channels_and_the_ends_keep_theirs():
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(12, 4),
        )
    )  # fmt: skip
    found = lab.analysis.errors_by_width(model, iter([X]), widths=(0.25, 0.5, 1.0))
    assert {name: each.params.tolist() for name, each in found.items()} == {
        "0": [2 * 6 * 9, 4 * 6 * 9, 8 * 6 * 9],
        "2": [3 * 2 * 9, 6 * 4 * 9, 12 * 8 * 9],
        "6": [4 * 3, 4 * 6, 4 * 12],
    }
    inputs = model[:2](X).detach().double()
    weight = model[2].weight.detach().double()
    whole = nn.functional.conv2d(inputs, weight, stride=2)
    part = torch.zeros_like(whole)
    part[:, :6] = nn.functional.conv2d(inputs[:, :4], weight[:6, :4], stride=2)
    assert found["2"].output[:, 1] == pytest.approx((whole - part).square().flatten(1).sum(1).numpy(), rel=1e-5)
    for each in found.values():
        assert each.relative[-1] == pytest.approx(0.0, abs=1e-9)


def test_the_model_is_as_before_and_what_cannot_be_is_refused():
    model = seeded(lambda: nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lab.analysis.errors_by_rank(model, [X])
    assert model.training
    assert not model[0]._forward_hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for call, message in (
        (lambda: lab.analysis.errors_by_rank(model, []), "it yielded no batch"),
        (lambda: lab.analysis.errors_by_rank(model, [X], images=0), "images=0"),
        (lambda: lab.analysis.errors_by_rank(model, [X], form="tucker"), "form='tucker'"),
        (lambda: lab.analysis.errors_by_rank(nn.ReLU(), [X]), "no layer to decompose"),
        (lambda: lab.analysis.errors_by_width(model, [X], widths=(0.0,)), r"widths=\(0.0,\)"),
        (lambda: lab.analysis.errors_by_rank(model, [["text"]]), "hold str"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            call()


def test_so_many_images_and_no_more():
    found = lab.analysis.errors_by_rank(seeded(lambda: nn.Sequential(nn.Conv2d(6, 4, 3))), [X, X], images=7)
    assert found["0"].output.shape[0] == 7
