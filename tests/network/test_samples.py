"""Samples that measure, and others that judge."""

import pytest
import torch

from decomposable.network import samples as module
from decomposable.network.samples import FEW
from decomposable.network.samples import dealt as dealt_by
from refusals import refused


def dealt(loader, run=lambda batch: batch):
    """Of a network that gives what it gets."""
    return dealt_by(loader, run)


def batches(count, size):
    """Batches whose rows are numbered."""
    return list(torch.arange(count * size, dtype=torch.float32)[:, None].split(size))


def rows(parts):
    return sorted(int(row) for part in parts for row in (part[0] if isinstance(part, tuple) else part))


@pytest.mark.parametrize(("count", "size"), [(20, 32), (10, 32), (2, 256), (1, 500), (7, 64)])
def test_a_fifth_is_kept_out(count, size):
    found = dealt([(each, each) for each in batches(count, size)])
    measure, judge = rows(found.measure), rows(found.judge)
    assert sorted(measure + judge) == list(range(count * size))
    assert not {*measure} & {*judge}
    assert (found.count, found.judging, found.measuring) == (count * size, len(judge), len(measure))
    assert 0.1 <= len(judge) / found.count <= 0.25
    assert not found.are_halves


@pytest.mark.parametrize(("count", "size"), [(4, 16), (1, 64), (2, 100), (5, 20), (3, 3)])
def test_few_samples_are_two_halves_that_change_places(count, size):
    found = dealt(batches(count, size))
    assert found.are_halves
    measure, judge = rows(found.measure), rows(found.judge)
    assert sorted(measure + judge) == list(range(count * size))
    assert min(len(measure), len(judge)) >= 0.3 * found.count
    assert [rows(each) for each in found.judges] == [judge, measure]
    both = found.all_that_measure
    assert rows(both.measure) == list(range(count * size))
    assert (both.measuring, both.judging, both.batches) == (found.count, 0, len(list(both.measure)))


def test_what_cannot_be_parted_stays_whole():
    """One batch with a text beside its rows: nothing is left to judge by."""
    found = dealt([{"x": torch.zeros(64, 3), "name": "a"}])
    assert len(list(found.measure)) == 1
    assert not found.judge


class Steps(torch.nn.Module):
    """An LSTM whose first axis is time; it may be called with samples first, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = torch.nn.LSTM(3, 4)

    def forward(self, x):
        return self.lstm(x)


def test_rows_that_are_no_samples_are_not_parted():
    """Steps in time: what they give depends on the steps before."""
    net = Steps()
    found = dealt([torch.randn(40, 6, 3)], net)
    assert not found.judge
    turned = dealt([torch.randn(40, 6, 3)], lambda batch: net(batch.transpose(0, 1)))
    assert (len(list(turned.measure)), len(turned.judge)) == (2, 2)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x - x.mean(dim=0),  # samples that depend on each other
        lambda x: x.sum(),
        lambda x: x.reshape(64, 3),  # a batch of one size only
        lambda x: None,
    ],
)
def test_what_gives_something_else_in_parts_stays_whole(run):
    assert not dealt([torch.randn(64, 3)], run).judge


def test_no_piece_has_a_single_row():
    """Batch normalisation could not run it."""
    found = dealt([torch.zeros(5, 3)])
    assert sorted(len(part) for part in (*found.measure, *found.judge)) == [2, 3]


def test_the_first_of_many():
    found = dealt(batches(50, 20))
    some = found.first(512)
    assert 512 <= some.measuring == len(rows(some.measure)) < 560
    assert rows(some.judge) == rows(found.judge)
    assert rows(some.measure) == rows(some.measure)  # again and again
    assert found.first(10_000) is found


def test_a_loader_that_is_too_large_to_keep_is_read_again(monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 100)
    loader = torch.utils.data.DataLoader(torch.arange(FEW * 2.0)[:, None], batch_size=32)
    found = dealt(loader)
    measure, judge = rows(found.measure), rows(found.judge)
    assert not {*measure} & {*judge}
    assert sorted(measure + judge) == list(range(FEW * 2))
    assert (found.batches, found.judging) == (len(list(found.measure)), len(judge))


def test_a_large_loader_that_shuffles_is_said_to_mix_them(monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 100)
    loader = torch.utils.data.DataLoader(torch.arange(FEW * 2.0)[:, None], batch_size=32, shuffle=True)
    with pytest.warns(UserWarning, match="the loader gives other batches in every pass"):
        list(dealt(loader).measure)


def test_a_small_loader_that_shuffles_is_read_once():
    loader = torch.utils.data.DataLoader(torch.arange(FEW * 2.0)[:, None], batch_size=32, shuffle=True)
    found = dealt(loader)
    measure, judge = rows(found.measure), rows(found.judge)
    assert not {*measure} & {*judge}
    assert rows(found.measure) == measure


def test_a_batch_that_comes_again_and_again_is_several():
    found = dealt([torch.zeros(16, 3)] * 4)
    assert (found.measuring, found.judging, found.batches) == (32, 32, 2)


def test_no_more_are_kept_out_than_judge():
    found = dealt(batches(100, 100))
    assert module.JUDGED_WITH <= found.judging < module.JUDGED_WITH + 100
    assert found.count == 10_000


@pytest.mark.parametrize(("count", "size"), [(8, 32), (4, 256), (2, 600)])
def test_a_large_loader_of_few_samples_or_batches_has_some_that_judge(count, size, monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 100)
    found = dealt(torch.utils.data.DataLoader(torch.arange(float(count * size))[:, None], batch_size=size))
    assert found.judge
    assert not found.are_halves
    assert sorted(rows(found.measure) + rows(found.judge)) == list(range(count * size))


def test_nothing_is_refused():
    with refused("data", 0, "a loader that begins anew each time"):
        dealt([])
