"""How long a step takes, told by a clock that the tests set themselves."""

from dataclasses import replace

import pytest
import torch

from decomposable_lab.comparison import estimate as estimating
from decomposable_lab.comparison.estimate import StepClock, estimate, timed
from decomposable_lab.comparison.parts import prepare
from decomposable_lab.comparison.stepping import Stepper


class Clock:
    """Shows what it was told has passed."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.calls = []
        monkeypatch.setattr(estimating.time, "perf_counter", lambda: self.now)

    def passing(self, *seconds):
        """A function whose calls take so long, one after the other; the last one from then on."""
        left = list(seconds)

        def call():
            self.now += left.pop(0) if len(left) > 1 else left[0]
            self.calls.append(self.now)

        return call


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_the_first_call_does_not_count(clock):
    assert timed(clock.passing(0.9, 0.1, 0.3, 0.2, 0.2)) == pytest.approx(0.1)
    assert len(clock.calls) == 1 + estimating.TIMED_CALLS


def test_long_calls_are_few(clock):
    assert timed(clock.passing(2.2, 2.1)) == pytest.approx(2.1)
    assert len(clock.calls) == 2
    assert timed(clock.passing(30.0)) == pytest.approx(30.0)
    assert len(clock.calls) == 3


def fake_stepper(clock, seconds_of, sizes, *, is_paced=False, refresh=1, shared=0.0):
    """In place of a method's step: `seconds_of(images, done)`; `sizes` are the batches that it was given. What late
    steps share, each `refresh` of them, takes `shared` seconds.
    """

    class Fake:
        def __init__(self, task, settings, example_input, device):
            self.is_paced, self.refresh, self.late = is_paced, refresh, 0

        def __call__(self, batch, done):
            sizes.append(len(batch[0]))
            clock.now += seconds_of(len(batch[0]), done)
            if shared and done >= 0.5:
                clock.now += shared if self.late % refresh == 0 else 0.0
                self.late += 1

    return Fake


@pytest.fixture
def digits(tmp_path):
    """Trainings with batches of 64 images."""
    return prepare("digits", out=tmp_path / "out", names=["plain", "decomposable"], overrides={"batch_size": 64})


@pytest.mark.parametrize(
    ("fixed", "per_image", "largest"),
    [(0.001, 0.0001, 64), (3.0, 0.0, 8), (2.5, 0.25, 8), (0.0, 10.0, 8)],
    ids=["quick", "the SVDs alone", "both", "the images alone"],
)
def test_a_long_step_is_told_by_two_small_batches(clock, digits, monkeypatch, fixed, per_image, largest):
    sizes = []
    fake = fake_stepper(clock, lambda images, done: fixed + per_image * images, sizes)
    monkeypatch.setattr(estimating, "Stepper", fake)
    steps = StepClock(digits[0].settings, digits[1])
    settings = digits[0].parts[0].settings
    assert steps._of_a_step(settings) == pytest.approx(fixed + 64 * per_image)
    assert max(sizes) == largest


def test_steps_that_change_in_a_training_are_timed_early_and_late(clock, digits, monkeypatch):
    fake = fake_stepper(clock, lambda images, done: 0.01 if done < 0.5 else 0.03, [], is_paced=True)
    monkeypatch.setattr(estimating, "Stepper", fake)
    steps = StepClock(digits[0].settings, digits[1])
    assert steps._of_a_step(digits[0].parts[0].settings) == pytest.approx(0.02)


@pytest.mark.parametrize("refresh", [2, 8])
def test_what_steps_share_is_counted_by_their_share(clock, digits, monkeypatch, refresh):
    """As the SVD of every eighth low-rank step of elastic training, which is long where the others are not."""
    fake = fake_stepper(
        clock,
        lambda images, done: images * (0.1 if done < 0.5 else 0.2),
        [],
        is_paced=True,
        refresh=refresh,
        shared=16.0,
    )
    monkeypatch.setattr(estimating, "Stepper", fake)
    steps = StepClock(digits[0].settings, digits[1])
    assert steps._of_a_step(digits[0].parts[0].settings) == pytest.approx((6.4 + 12.8 + 16.0 / refresh) / 2)


@pytest.mark.parametrize(
    ("changed", "refresh"),
    [({"method": "decomposable", "refresh": 4}, 4), ({"method": "elastic"}, 8), ({"method": "plain"}, 1)],
)
def test_how_many_steps_share_their_bases(digits, changed, refresh):
    comparison, circumstances = digits
    task = circumstances.task(comparison.settings)
    example = task.load_data().test_batch(torch.arange(1))[0]
    stepper = Stepper(task, replace(comparison.settings, **changed), example, torch.device("cpu"))
    assert stepper.refresh == refresh


def test_comparisons_with_one_clock_time_a_step_once(clock, tmp_path, monkeypatch):
    sizes, told = [], []
    monkeypatch.setattr(estimating, "Stepper", fake_stepper(clock, lambda images, done: 10.0, sizes))
    shared = None
    for name in ("one", "two"):
        comparison, circumstances = prepare("digits", out=tmp_path / name, names=["plain"])
        shared = shared or StepClock(comparison.settings, circumstances)
        (found,) = estimate(
            comparison, circumstances, jobs=1, progress=lambda line: told.append(str(line)), clock=shared
        )
        assert found.seconds > 10
        assert len(sizes) == 2  # a small batch and one of twice the size, each so long that one call tells
    assert sum("a step of plain" in line for line in told) == 1
