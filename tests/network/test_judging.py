"""Judged by what it did not see: a cut by data that is no better than singular values is not taken."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import decomposable as dn
from decomposable.core.distillation import kl_divergence
from decomposable.core.sums import Moments
from decomposable.network import descent
from decomposable.network.goals import LOSS
from decomposable.network.judging import CutReport, Judge, JudgedSize, prefers_weights
from refusals import Saying, refused

WIDE, CLASSES = 384, 200


class WideHead(nn.Module):
    """A last layer that is much wider than there are images, which has one position an image."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(40, WIDE), nn.ReLU())
        self.fc = nn.Linear(WIDE, CLASSES)

    def forward(self, x):
        return self.fc(self.features(x))


def inputs(count, seed):
    return torch.randn(count, 40, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def wide():
    """A network whose head uses all directions of what it sees, as those of real ones do."""
    torch.manual_seed(0)
    model = WideHead().eval()
    with torch.no_grad():
        model.fc.weight.copy_(3 * torch.linalg.qr(torch.randn(WIDE, CLASSES))[0].T)
    return model


def lost(model, net, size):
    x = inputs(512, seed=9)
    net.resize_(macs=size)
    with torch.no_grad():
        return float(kl_divergence(net(x), model(x)))


@pytest.mark.parametrize("count", [64, 96, 400])
def test_few_images_and_a_wide_last_layer_are_never_worse_than_singular_values(wide, count, recwarn):
    """With as many images as ranks everything else looks free: rank 64 of 200 was kept where 64 images were seen."""
    data = list(inputs(count, seed=1).split(16))
    net, plain = dn.decompose(wide, data=data), dn.decompose(wide, data[0])
    for size in (0.9, 0.75, 0.5):
        assert lost(wide, net, size) <= 1.02 * lost(wide, plain, size), size
    if count < CLASSES:
        assert net.plan(macs=0.9).ranks["fc"] > count


def test_the_report_says_what_was_kept_and_by_whom_it_was_judged(wide, recwarn):
    few = dn.decompose(wide, data=list(inputs(64, seed=1).split(16))).cut_report
    assert (few.is_crossed, few.measured_with, few.judged_with) == (True, 64, 64)
    many = dn.decompose(wide, data=list(inputs(400, seed=1).split(20))).cut_report
    assert (many.is_crossed, many.measured_with, many.judged_with) == (False, 320, 80)
    for report in (few, many):
        assert report.kept in ("data", "weights")
        assert [each.size for each in report.sizes] == [0.9, 0.75, 0.5, 0.35, 0.25, 0.12]
        assert "KL divergence to the full network" in str(report)
        assert report.as_dict()["sizes"][0]["size"] == 0.9
    assert dn.decompose(wide, inputs(1, 0)).cut_report is None


CERTAIN, MARGIN = 6, 14.0


def certain_of_most():
    """Six classes that the network is in doubt between, and six that it is certain of: their logits stand out by 8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2 * CERTAIN, 2 * CERTAIN)).eval()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].weight[:CERTAIN, :CERTAIN] = torch.linalg.qr(torch.randn(CERTAIN, CERTAIN))[0]
        model[0].weight[CERTAIN:, CERTAIN:] = MARGIN / 4 * torch.eye(CERTAIN)
        model[0].bias.zero_()
        model[0].bias[CERTAIN:] = -6.0
    return model


def mostly_clear(count, seed):
    """Of ten samples three are in doubt."""
    generator = torch.Generator().manual_seed(seed)
    in_doubt = torch.rand(count, 1, generator=generator) < 0.3
    doubts = 2 * torch.randn(count, CERTAIN, generator=generator)
    clear = 4 * F.one_hot(torch.randint(CERTAIN, (count,), generator=generator), CERTAIN).float()
    return torch.cat([doubts * in_doubt, clear * ~in_doubt], dim=1)


def test_a_metric_that_is_worse_than_the_weights_is_dropped():
    """Where a network is certain its loss has no gradient: what makes it certain looks free, and is not.

    That is no matter of few samples, and every layer's own metric agrees: only whole networks tell.
    """
    model, data = certain_of_most(), list(mostly_clear(1000, seed=1).split(50))
    with pytest.warns(UserWarning, match="a cut by data is no better than one by singular values, which is taken"):
        net = dn.decompose(model, data=data)
    assert (net.cut_report.kept, net.cut_report.layers_by_weights) == ("weights", ())
    assert all(each.by_data > each.by_weights for each in net.cut_report.sizes)
    plain = dn.decompose(model, data[0])
    assert all(net.plan(macs=s).ranks == plain.plan(macs=s).ranks for s in (0.9, 0.5, 0.2))
    x = mostly_clear(4, seed=3)
    net.resize_(macs=0.5)
    plain.resize_(macs=0.5)
    assert torch.equal(net(x), plain(x))


def test_a_layer_whose_metric_is_worse_goes_by_its_weights(wide, monkeypatch):
    """Of one layer the moments are made wrong: the samples that were kept out show it."""
    from decomposable.core import sums

    def wrong(moments):
        found = sums.shrunk(moments)
        if len(found.inputs) != WIDE:
            return found
        return sums.replace(found, inputs=torch.linalg.inv(found.inputs + 0.01 * torch.eye(WIDE)))

    monkeypatch.setattr(descent, "shrunk", wrong)
    report = dn.decompose(wide, data=list(inputs(400, seed=1).split(20))).cut_report
    assert report.layers_by_weights == ("fc",)
    assert "layers that are cut by their weights: fc" in str(report)


def test_one_batch_that_cannot_be_parted_goes_by_singular_values(wide):
    batch = {"x": inputs(64, seed=1), "name": "one"}
    with pytest.warns(UserWarning, match="one batch that cannot be parted.*bases go by singular values"):
        net = dn.decompose(wide, data=[batch])
    assert (net.cut_report.kept, net.cut_report.judged_with) == ("weights", 0)


def judged(*pairs):
    return [JudgedSize(size=0.5, by_data=data, by_weights=weights) for data, weights in pairs]


def test_who_is_preferred():
    assert not prefers_weights(judged((1.0, 2.0), (1.1, 1.0)))
    assert prefers_weights(judged((2.0, 1.0), (1.0, 1.1)))
    assert prefers_weights(judged((math.nan, 1.0)))
    assert not prefers_weights(judged((1.0, math.inf)))
    assert not prefers_weights(judged((1.0, 1.0)))


def test_only_ranks_that_save_something_tell_which_bases_are_better():
    """A layer of 40 × 40 is cheaper dense from rank 20 on: what its bases lose there is never lost."""
    eye = torch.eye(40, dtype=torch.float64)
    good_when_small = descent.InMetric(eye, eye, torch.ones(40))
    backwards = eye.flip(1)
    good_when_large = descent.InMetric(backwards, backwards.T, torch.ones(40))
    used = Moments(torch.diag(torch.cat([torch.full((10,), 4.0), torch.full((30,), 1.0)])))
    assert descent._is_worse(good_when_large, good_when_small, used)
    assert not descent._is_worse(good_when_small, good_when_large, used)
    assert len(descent._relative_loss(good_when_small, used)) == 20


def test_a_judge_goes_by_the_batches_own_statistics_and_leaves_the_networks_as_they_are():
    """In both networks, so that they differ by nothing but the cut."""
    torch.manual_seed(0)
    full, other = (
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).eval() for _ in range(2)
    )
    batches = [torch.randn(10, 6) for _ in range(4)]
    before = [{name: value.clone() for name, value in net.state_dict().items()} for net in (full, other)]
    judge = Judge.of(full, batches[:3], lambda net, batch: net(batch), LOSS)
    assert judge.samples == 30
    assert judge.first(10).samples == 10
    assert judge.distance(full) == 0
    found = judge.distance(other)
    for net, kept in zip((full, other), before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())
        assert not any(module.training for module in net.modules())
        net[1].train()
    with torch.no_grad():
        wanted = sum(float(kl_divergence(other(x), full(x))) for x in batches[:3]) / 3
    assert found == pytest.approx(wanted, rel=1e-5)


def test_a_report_reads_as_a_table():
    report = CutReport(
        criterion="loss",
        unit="KL divergence",
        measured_with=800,
        judged_with=200,
        sizes=tuple(judged((0.1, 0.25))),
        kept="data",
    )
    worse = replace(report, sizes=(*report.sizes, JudgedSize(size=0.12, by_data=6.0, by_weights=5.0)))
    assert str(worse).splitlines()[-1] == "better by weights at 0.12, but not over all sizes"
    assert str(report).splitlines() == [
        "bases by data, criterion loss: 800 samples measured, 200 others judged",
        "KL divergence to the full network:",
        "  size    by data by weights",
        "   0.5        0.1       0.25",
    ]


class Embedding(nn.Module):
    """Features of length 1, and one `Linear` that sees one position a sample."""

    def __init__(self):
        super().__init__()
        self.lstm, self.linear = nn.LSTM(12, 48, 2, batch_first=True), nn.Linear(48, 32)

    def forward(self, x):
        _, (hidden, _) = self.lstm(x)
        return F.normalize(self.linear(hidden[-1]).relu(), dim=1)


def test_a_network_without_logits_goes_by_its_own_output(recwarn):
    """Not by that of every layer, whose `Linear` lost all directions but as many as there were samples."""
    torch.manual_seed(0)
    model = Embedding().eval()
    data = list(torch.randn(32, 20, 12, generator=torch.Generator().manual_seed(1)).split(8))
    net = dn.decompose(model, data=data)
    assert net.cut_report.criterion == "output"
    x = torch.randn(64, 20, 12, generator=torch.Generator().manual_seed(2))
    for size, least in ((0.7, 0.97), (0.5, 0.9)):
        net.resize_(macs=size)
        with torch.no_grad():
            assert float((net(x) * model(x)).sum(dim=1).mean()) > least, size


class Experts(nn.Module):
    """Of which one sees no sample of some batches."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 16), nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x):
        to_a = x[:, 0] > 0
        out = x.new_zeros(len(x), 16)
        out = out.index_put((to_a.nonzero()[:, 0],), self.a(x[to_a]))
        return self.head(out.index_put(((~to_a).nonzero()[:, 0],), self.b(x[~to_a])).relu())


def test_a_layer_that_sees_nothing_of_a_batch(recwarn):
    torch.manual_seed(0)
    x = torch.randn(400, 6) @ torch.randn(6, 6)
    x = x[x[:, 0].argsort()]  # whole batches go to one of the two
    net = dn.decompose(Experts().eval(), data=list(x.split(20)))
    assert net.cut_report.judged_with == 80
    net.resize_(macs=0.7)
    assert net(x).isfinite().all()


class Detector(nn.Module):
    """Gives as many rows as are above a threshold."""

    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        boxes = self.head(self.trunk(x).relu())
        return boxes[boxes[:, 0] > 0]


def test_outputs_whose_shape_depends_on_the_numbers_are_refused_in_one_line():
    torch.manual_seed(0)
    with refused("data", Saying(r"^\(\d+, 3\)$"), Saying("by forward=$")):
        dn.decompose(Detector().eval(), data=list(torch.randn(400, 6).split(20)), criterion="output")
