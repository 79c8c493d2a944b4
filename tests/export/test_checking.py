"""The difference between two outputs, against hand-made numbers."""

import math

import numpy as np
import pytest
import torch

from decomposable.export.checking import check_tolerance, difference, largest_difference, require_close
from decomposable.export.program import ExportError
from decomposable_edge.errors import InvalidArgumentError

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("wanted", "got", "expected"),
    [
        ([0.5, -0.25], [0.5, -0.125], 0.125),  # small outputs count absolutely
        ([100.0, 0.0], [100.0, 1.0], 0.01),  # large ones as a part of the largest
        ([-8.0], [8.0], 2.0),
        ([NAN, INF, 1.0], [NAN, INF, 1.0], 0.0),  # what PyTorch says, be it as it is
        ([NAN], [1.0], INF),
        ([1.0], [NAN], INF),
        ([INF], [-INF], INF),
        ([], [], 0.0),
    ],
)
def test_difference(wanted, got, expected):
    assert difference(np.array(wanted, np.float32), np.array(got, np.float32)) == pytest.approx(expected)


def test_of_whole_numbers_and_truth():
    assert difference(np.array([2, 3]), np.array([2, 2])) == pytest.approx(1 / 3)
    assert difference(np.array([True]), np.array([False])) == 1


def same(batch):
    return [batch["x"].numpy()]


def test_the_largest_over_all_batches_and_outputs():
    errors = {1: 0.0, 2: 0.5, 3: 0.25}
    batches = [{"x": torch.ones(n, 2)} for n in errors]
    assert largest_difference(same, lambda b: [b["x"].numpy() + errors[len(b["x"])]], batches) == 0.5
    with pytest.raises(ExportError, match=r"a batch of \(1, 2\) the file gives outputs of shape \[\(1,\)\], PyTorch"):
        largest_difference(same, lambda b: [b["x"].numpy()[:, 0]], batches)
    with pytest.raises(ExportError, match="shape"):
        largest_difference(same, lambda b: [], batches)


def test_an_output_without_any_number_is_not_taken_for_the_same():
    def run(batch):
        return [batch["x"].numpy(), batch["x"].log().numpy()]

    minus, plus = {"x": -torch.ones(1, 2)}, {"x": torch.ones(2, 2)}
    with pytest.raises(ExportError, match=r"no finite number.*example_input="):
        largest_difference(run, run, [minus, minus])
    assert largest_difference(run, run, [minus, plus]) == 0
    assert largest_difference(same, same, [{"x": torch.ones(1, 0)}]) == 0  # nothing to be wrong


def test_what_is_close():
    require_close(1e-4, 1e-4)
    for found in (1.1e-4, INF, NAN):
        with pytest.raises(ExportError, match="nothing was written"):
            require_close(found, 1e-4)
    assert check_tolerance(np.float32(0.5)) == 0.5
    for wrong in (True, "1", None, INF):
        with pytest.raises(InvalidArgumentError, match="tolerance="):
            check_tolerance(wrong)
