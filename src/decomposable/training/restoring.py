"""Going on from a checkpoint: what it says is checked against this run before any of it is taken."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.data.base import TrainBatches
from decomposable.fields import Fields, require
from decomposable.methods.base import Step
from decomposable.text import first_line
from decomposable.training.checkpoint import CheckpointError, set_random_state

_MOST_COMMITS = 1000


@dataclass
class Position:
    """Where a run is: updates made, seconds spent, and the sums for the line of the epoch that is under way."""

    step: int = 0
    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    count: int = 0
    commits: list[str] = field(default_factory=list)  # of the code that made the steps

    def add(self, values: Mapping[str, float]) -> None:
        """Count one step's values."""
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count += 1

    def means(self) -> dict[str, float]:
        """The mean over the epoch's steps; starts the next epoch's."""
        means = {name: total / self.count for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


def position_in(saved: Mapping[str, Any], path: Path, batches: TrainBatches) -> Position:
    """Where the run was that a checkpoint is of; it has to be a place that this run comes to."""
    with _fitting(path):
        record = Fields(saved["position"], "the position")
        step = record.integer("step", 0, len(batches))
        total = f"'step' of the position is {step:,} of {len(batches):,}"
        is_place = record.integer("count") == step % batches.per_epoch
        require(is_place, f"{total}, with {record.integer('count'):,} of the epoch's {batches.per_epoch:,}")
        seconds, sums, commits = record.get("seconds"), record.mapping("sums"), record.texts("commits")
        require(_is_finite(seconds) and seconds >= 0, f"'seconds' of the position is {seconds!r:.40}")
        require(all(map(_is_finite, sums.values())) and bool(sums) <= bool(record.get("count")), "the sums are none")
        require(len(commits) <= _MOST_COMMITS, f"it has {len(commits):,} commits")
        return Position(step=step, seconds=seconds, sums=dict(sums), count=step % batches.per_epoch, commits=commits)


def restore_(
    saved: Mapping[str, Any], path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, method: Step
) -> None:
    """Put the states of a checkpoint into the model, the optimiser, the method and the global generators."""
    with _fitting(path):
        _check_model(saved["model"], model)
        _check_optimizer(saved["optimizer"], optimizer)
        method.load_state_dict(saved["method"])
        state = OrderedDict(saved["model"])
        state._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # the same code's: nothing is old
        model.load_state_dict(state)
        optimizer.load_state_dict(dict(saved["optimizer"]))
        set_random_state(saved["random"])


@contextmanager
def _fitting(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever does not fit
        raise CheckpointError(f"{path} does not fit this run: {first_line(error)}") from error


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_model(saved: Mapping[str, Any], model: nn.Module) -> None:
    """The same tensors of the same shapes and types, and weights that can be gone on with."""
    own = model.state_dict()
    require(saved.keys() == own.keys(), f"the model's '{next(iter(saved.keys() ^ own.keys()), '')}' is not in both")
    for name, value in own.items():
        _check_like(saved[name], value, f"the model's '{name}'")
    for name, _ in model.named_parameters():
        is_finite = not isinstance(saved.get(name), Tensor) or bool(saved[name].isfinite().all())
        require(is_finite, f"the model's '{name}' is NaN or infinite")


def _check_like(value: object, own: object, what: str) -> None:
    if isinstance(own, Tensor):
        require(isinstance(value, Tensor), f"{what} is no tensor")
        assert isinstance(value, Tensor)
        same = value.shape == own.shape and value.dtype == own.dtype
        came, wanted = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (value, own))
        require(same, f"{what} is {came}, not {wanted}")
    else:
        require(type(value) is type(own), f"{what} is a {type(value).__name__}, not a {type(own).__name__}")


def _check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """The same groups with the same settings but for the rate, which every step sets; a momentum for each parameter."""
    own = optimizer.state_dict()
    require(saved.keys() == own.keys(), "the optimiser's state is not one")
    groups, count = saved["param_groups"], len(own["param_groups"])
    require(isinstance(groups, list) and len(groups) == count, f"the optimiser has not {count} groups")
    for theirs, ours in zip(groups, own["param_groups"], strict=True):
        require(isinstance(theirs, dict) and theirs.keys() == ours.keys(), "a group of the optimiser is another one")
        for name in ours.keys() - {"lr"}:
            require(
                theirs[name] == ours[name], f"the optimiser's {name} is {theirs[name]!r:.40}, not {ours[name]!r:.40}"
            )
        require(_is_finite(theirs["lr"]), f"the optimiser's lr is {theirs['lr']!r:.40}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = saved["state"]
    require(isinstance(state, dict) and state.keys() <= set(range(len(parameters))), "the optimiser's state is not one")
    for number, entry in state.items():
        require(isinstance(entry, dict) and entry.keys() == {"momentum_buffer"}, "the optimiser's state is not one")
        if entry["momentum_buffer"] is not None:
            _check_like(entry["momentum_buffer"], parameters[number].detach(), f"the momentum of parameter {number}")
