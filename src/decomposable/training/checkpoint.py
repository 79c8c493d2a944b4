"""Everything that a run needs to go on exactly where it was, in one file that is replaced as a whole.

`state_file.py` says what the file is like. A bit that has changed anywhere is found before anything goes on.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.data.base import TrainBatches
from decomposable.training.devices import random_state, set_random_state
from decomposable.training.methods.base import Step
from decomposable.training.state_file import CHECKPOINT, read_state, write_state
from decomposable_edge.errors import ArtifactError, FileError
from decomposable_edge.fields import Damaged, Fields, require
from decomposable_edge.text import first_line

_ENTRIES = ("random", "run", "position", "model", "optimizer", "method", "bits_depend_on")
_KEPT: dict[type, set[str]] = {  # what an optimiser keeps for every parameter
    torch.optim.SGD: {"momentum_buffer"},
    torch.optim.AdamW: {"exp_avg", "exp_avg_sq", "step"},
}
_MOST_COMMITS = 1000


class CheckpointError(FileError):
    """A checkpoint cannot be read, or is of another run."""


class Checkpoints:
    """The checkpoint of one run, and when the next one is due."""

    def __init__(self, path: Path, *, every_seconds: float) -> None:
        self.path, self.every_seconds = path, every_seconds
        self._written = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Return whether it is time to write one."""
        return time.monotonic() - self._written >= self.every_seconds

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; a crash in between leaves the old one."""
        try:
            write_state(self.path, {"random": random_state(), **state}, CHECKPOINT)
        except OSError as error:
            why = f"it cannot be written (is the disk full?); the one before is kept: {error}"
            raise CheckpointError.of(self.path, why) from error
        self._written = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """Read the last one; None if there is none yet."""
        return read_checkpoint(self.path) if self.path.exists() else None


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint, all of it verified."""
    try:
        state = read_state(path, CHECKPOINT)
        for name in _ENTRIES:
            require(isinstance(state.get(name), dict), f"it has no {name}")
        return state
    except (ArtifactError, Damaged, RecursionError) as error:
        raise CheckpointError.of(path, f"it is no checkpoint: {getattr(error, 'reason', None) or error}") from error


@dataclass
class Position:
    """Where a run is: updates made, seconds spent, and the sums for the line of the current epoch."""

    step: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # of the steps that had each of these
    count: int = 0
    commits: list[str] = field(default_factory=list)  # of the code that made the steps

    def add(self, values: Mapping[str, float]) -> None:
        """Count one step's values."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1
        self.count += 1

    def means(self) -> dict[str, float]:
        """Return the mean over the epoch's steps that had a value, and start the next epoch's."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts, self.count = {}, {}, 0
        return means


def position_in(saved: Mapping[str, Any], path: Path, batches: TrainBatches) -> Position:
    """Return where the run was; refuse a place that this run never comes to."""
    with _fitting(path):
        record = Fields(saved["position"], "the position")
        step, count = record.integer("step", 0, len(batches)), record.integer("count")
        total = f"'step' of the position is {step:,} of {len(batches):,}"
        is_place = count == step % batches.per_epoch
        require(is_place, f"{total}, with {count:,} of the epoch's {batches.per_epoch:,}")
        seconds, sums, commits = record.get("seconds"), record.mapping("sums"), record.texts("commits")
        require(_is_finite(seconds) and seconds >= 0, f"'seconds' of the position is {seconds!r:.40}")
        require(all(map(_is_finite, sums.values())) and bool(sums) <= bool(count), "the sums are none")
        require(len(commits) <= _MOST_COMMITS, f"it has {len(commits):,} commits")
        counts = record.mapping("counts")
        are_right = counts.keys() == sums.keys() and all(type(n) is int and 1 <= n <= count for n in counts.values())
        require(are_right, "the counts are not those of the sums")
        return Position(step=step, seconds=seconds, sums=dict(sums), counts=dict(counts), count=count, commits=commits)


def restore_(
    saved: Mapping[str, Any],
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: Step,
    *,
    index: int = 0,
) -> None:
    """Put the states of a checkpoint into the model, the optimiser, the method and the global generators.

    Every process of a run has generators of its own. A process that was not there before keeps what it has.
    """
    with _fitting(path):
        _check_model(saved["model"], model)
        _check_optimizer(saved["optimizer"], optimizer)
        method.load_state_dict(saved["method"])
        state = OrderedDict(saved["model"])
        state._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # the same code's: nothing is old
        model.load_state_dict(state)
        optimizer.load_state_dict(dict(saved["optimizer"]))
        generators = [saved["random"], *saved.get("random_of_others", [])]
        if index < len(generators):
            set_random_state(generators[index])


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever does not fit
        raise CheckpointError.of(path, f"it does not fit this run: {first_line(error)}") from error


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_like(value: object, own: object, what: str) -> None:
    """Refuse a value of another kind, and a tensor of another shape or type."""
    came, wanted = (
        f"{each.dtype} of shape {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
        for each in (value, own)
    )
    require(came == wanted, f"{what} is {came}, not {wanted}")


def _check_model(saved: Mapping[str, Any], model: nn.Module) -> None:
    """Refuse tensors of other names, shapes or types, and weights that are not finite."""
    own = model.state_dict()
    require(saved.keys() == own.keys(), f"the model's '{next(iter(saved.keys() ^ own.keys()), '')}' is not in both")
    for name, value in own.items():
        _check_like(saved[name], value, f"the model's '{name}'")
    for name, _ in model.named_parameters():
        is_finite = not isinstance(saved.get(name), Tensor) or bool(saved[name].isfinite().all())
        require(is_finite, f"the model's '{name}' is NaN or infinite")


def _check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Refuse other groups or settings, but for the rate, which every step sets, and a state of other shapes.

    What differs is named before, as a setting of the run.
    """
    own = optimizer.state_dict()
    is_state = "the optimiser's state is not one"
    require(saved.keys() == own.keys(), is_state)
    groups, state = saved["param_groups"], saved["state"]
    require(isinstance(groups, list) and all(isinstance(group, dict) for group in groups), is_state)
    theirs, ours = ([{**group, "lr": None} for group in each] for each in (groups, own["param_groups"]))
    require(theirs == ours, "the optimiser's groups are not those of this run")
    require(all(_is_finite(group.get("lr")) for group in groups), "the optimiser's rate is no finite number")
    parameters = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    require(isinstance(state, dict) and state.keys() <= set(range(len(parameters))), is_state)
    for number, entry in state.items():
        require(isinstance(entry, dict) and entry.keys() == _KEPT[type(optimizer)], is_state)
        for name, value in entry.items():
            if name == "step":
                _check_like(value, torch.tensor(0.0), f"the count of steps of parameter {number}")
                require(bool(value.isfinite()) and value >= 0, "the optimiser's count of steps is none")
            elif value is not None:
                _check_like(value, parameters[number], f"the {name} of parameter {number}")
