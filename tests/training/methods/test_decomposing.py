"""Sizes by decomposition: their names, the sizes that are calibrated, and what is asked of the material."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from decomposable import models
from decomposable.recipes.settings import Settings
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.decomposing import decomposed
from decomposable_edge.errors import InvalidArgumentError


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def model():
    return models.small_cnn((8, 8, 8, 8, 8))


class Watched:
    """Calibration data that count how often they are gone through."""

    def __init__(self):
        self.passes = 0

    def __iter__(self):
        self.passes += 1
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            yield torch.randn(6, 1, 8, 8, generator=generator), torch.arange(6)


def material(data=None, lines=None):
    return CalibrationData(
        example_input=torch.zeros(1, 1, 8, 8),
        calibration=Watched() if data is None else data,
        loss=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]),
        progress=(lambda text: None) if lines is None else lines.append,
    )


def calibrated(net):
    return int(re.search(r"(\d+) sizes calibrated", repr(net)).group(1))


def test_the_sizes_of_the_settings_are_calibrated():
    net = decomposed(model(), material(), Settings(calibrated_sizes=(0.4, 0.6, 0.8)))
    assert calibrated(net) == 3


def test_sizes_that_the_network_cannot_have_are_left_out():
    net = decomposed(model(), material(), Settings(calibrated_sizes=(0.001, 0.5)))
    assert net.selector.smallest_size > 0.001
    assert calibrated(net) == 1


@pytest.mark.parametrize("sizes", [(), (0.001,)])
def test_without_a_size_that_it_can_have_a_dense_grid_is_calibrated(sizes):
    net = decomposed(model(), material(), Settings(calibrated_sizes=sizes))
    assert calibrated(net) > 20


@pytest.mark.filterwarnings("error")
def test_statistics_of_a_size_are_those_of_the_calibration_data_and_nothing_is_warned_of():
    net = decomposed(model(), material(), Settings(calibrated_sizes=(0.5,)))
    net.resize_(macs=0.5)
    module = net.extract()
    seen = []
    hook = module[1].register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    module.eval()
    with torch.no_grad():
        for x, _ in Watched():
            module(x)
    hook.remove()
    mean = torch.stack([x.mean(dim=(0, 2, 3)) for x in seen]).mean(dim=0)
    torch.testing.assert_close(module[1].running_mean, mean, rtol=1e-4, atol=1e-5)


def test_the_data_are_gone_through_once_and_once_more_for_the_taylor_criterion():
    for criterion, passes in (("singular_value", 1), ("taylor", 2)):
        data = Watched()
        decomposed(model(), material(data), Settings(criterion=criterion, calibrated_sizes=(0.5,)))
        assert data.passes == passes


def test_the_settings_decide_form_and_smallest_rank():
    net = decomposed(model(), material(), Settings(form="channel", min_rank=3, calibrated_sizes=(0.5,)))
    assert min(net.selector.smallest_plan().ranks.values()) == 3
    net.resize_(net.selector.smallest_plan())
    assert net.extract()[7][0].kernel_size == (3, 3)


def test_layers_may_be_left_out():
    net = decomposed(
        model(), material(), Settings(calibrated_sizes=(0.9,)), filter_fn=lambda module, name: name in ("3", "7")
    )
    assert list(net.plan().ranks) == ["3", "7"]


def test_what_is_under_way_is_told():
    lines = []
    decomposed(model(), material(lines=lines), Settings(calibrated_sizes=(0.5,)))
    assert lines[0] == "decomposing"


def test_a_network_without_batch_normalisation_needs_no_data():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 4))
    data = Watched()
    assert calibrated(decomposed(net, material(data), Settings())) == 0
    assert data.passes == 0


def test_a_network_with_nothing_to_decompose_is_refused():
    with pytest.raises(InvalidArgumentError, match="no layer to decompose"):
        decomposed(nn.BatchNorm2d(1), material(), Settings())
