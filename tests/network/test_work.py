"""The plan of a cut by data: what is said of it, and that it is kept."""

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.network.work import stages


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 40)
    ).eval()


@pytest.mark.parametrize("count", [10, 60])  # batches: two halves that judge each other, and a fifth that is kept out
def test_all_work_is_counted_and_its_search_too(count):
    mixing = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    images = torch.randn(count * 8, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    data = list(torch.einsum("bchw,cd->bdhw", images, mixing).split(8))
    lines = []
    net = dn.decompose(network(), data=data, progress=lines.append)
    ahead = next(line for line in lines if line.startswith(f"measuring {count * 8} samples, about "))
    counted = [line for line in lines if line.task == "measuring"]
    assert lines.index(ahead) < lines.index(counted[0])
    assert "MiB of moments" in ahead
    fractions = [line.fraction for line in counted]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.02
    assert len({round(fraction, 2) for fraction in fractions}) > 20
    for what in (
        "the full network",
        "the network at 0.25x",
        "statistics at 0.5x",
        "sharing out a cut",
        "judging a cut",
    ):
        assert any(what in line for line in counted), what
    assert net.cut_report.kept == "data"  # else the last part is left out, of few samples
    assert fractions[-1] == pytest.approx(1.0, abs=0.02)
    assert fractions[-3] < 1


def test_sizes_on_the_way_fall_and_stay_above_the_smallest():
    steps = [size for _, sizes in stages(0.1) for size in sizes]
    assert steps[:3] == [0.9, 0.71, 0.5]
    assert steps == sorted(steps, reverse=True)
    assert min(steps) > 0.1
    assert stages(0.6) == [(None, (pytest.approx(0.6**0.5),))]
