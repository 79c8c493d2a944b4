"""Everything that a run needs to go on exactly where it was, in one file that is replaced as a whole.

The file is of the same make as a network's (`network/file/container.py`): safetensors with a description in JSON, no
pickle, and SHA-256 checksums over all of it, so that a bit that has changed anywhere is found before anything is gone
on with. The state is a tree, written as JSON and a flat list of tensors: dicts, whose keys are text or whole numbers,
lists, tuples, numbers, text, None and tensors come back as what they were; anything else is refused when it is written.
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
from decomposable.network.file.container import DTYPE_NAMES, open_container, write_container
from decomposable.training.devices import random_state, set_random_state
from decomposable.training.methods.base import Step
from decomposable_edge.errors import ArtifactError, DecomposableError, InvalidArgumentError
from decomposable_edge.fields import Damaged, Fields, require
from decomposable_edge.text import first_line

VERSION = 2
"""The version of what is in a checkpoint."""
_ENTRIES = ("random", "run", "position", "model", "optimizer", "method", "bits_depend_on")
_KIND = "checkpoint"
_MEANS: dict[type, dict[str, str]] = {  # what an optimiser keeps for every parameter, and what it is
    torch.optim.SGD: {"momentum_buffer": "momentum"},
    torch.optim.AdamW: {"exp_avg": "momentum", "exp_avg_sq": "mean square"},
}
_MOST_COMMITS = 1000


class CheckpointError(DecomposableError):
    """A checkpoint cannot be read, or is of another run."""


class Checkpoints:
    """The checkpoint of one run, and when the next one is due."""

    def __init__(self, path: Path, *, every_seconds: float) -> None:
        self.path, self.every_seconds = path, every_seconds
        self._written = time.monotonic()

    @property
    def is_due(self) -> bool:
        """Whether the time has come to write one."""
        return time.monotonic() - self._written >= self.every_seconds

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; a crash in between leaves the old one."""
        tensors: dict[str, Tensor] = {}
        content = {name: pack(value, tensors, name) for name, value in {"random": random_state(), **state}.items()}
        try:
            write_container(self.path, {"kind": _KIND, "version": VERSION, "content": content}, tensors)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written (is the disk full?); the one before is kept: {error}"
            ) from error
        self._written = time.monotonic()

    def read(self) -> dict[str, Any] | None:
        """The last one; None where there is none yet."""
        return read_checkpoint(self.path) if self.path.exists() else None


def is_checkpoint(path: Path) -> bool:
    """Whether a file of this package is one."""
    with open_container(path) as container:
        return container.description.get("kind") == _KIND


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint holds, all of it verified."""
    try:
        with open_container(path) as container:
            kind, version = map(container.description.get, ("kind", "version"))
            require(kind == _KIND, f"it holds a {kind!r:.40}")
            require(type(version) is int and version == VERSION, f"it is of version {version!r:.40}, this is {VERSION}")
            require("content" in container.description, "it has no content")
            content = container.description["content"]
            require(isinstance(content, dict), "its content is not an object")
            tensors = container.read_all()
            state = {name: unpack(value, tensors) for name, value in content.items()}
            for name in _ENTRIES:
                require(isinstance(state.get(name), dict), f"it has no {name}")
            return state
    except (ArtifactError, RecursionError) as error:
        reason = error.reason if isinstance(error, ArtifactError) else None
        raise CheckpointError(f"{path} is no checkpoint: {reason or error}") from error


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The value as JSON holds it; its tensors are added to `tensors`, under names that begin with a number.

    >>> tensors = {}
    >>> packed = pack({"w": torch.ones(2), "step": (3, [None, 0.5])}, tensors, "state")
    >>> packed
    {'dict': {'w': {'tensor': '0/state/w'}, 'step': {'tuple': [3, [None, 0.5]]}}}
    >>> unpack(packed, tensors)
    {'w': tensor([1., 1.]), 'step': (3, [None, 0.5])}
    """
    if isinstance(value, Tensor):
        return _pack_tensor(value, tensors, where)
    if isinstance(value, Mapping):
        packed = {key: pack(entry, tensors, f"{where}/{key}") for key, entry in value.items()}
        if all(type(key) is str for key in packed):
            return {"dict": packed}
        if all(type(key) in (str, int) for key in packed):
            return {"items": [[key, entry] for key, entry in packed.items()]}
    if isinstance(value, list | tuple):
        entries = [pack(entry, tensors, f"{where}/{i}") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"tuple": entries}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    raise InvalidArgumentError(
        f"checkpoint: {where} is a {type(value).__name__}, or has such keys; allowed: tensors, numbers, text, None, "
        "and lists, tuples and dicts of these"
    )


def _pack_tensor(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> dict[str, str]:
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.dtype not in DTYPE_NAMES.values():
        raise InvalidArgumentError(f"checkpoint: {where} is {tensor.dtype}, {tensor.layout}; allowed: plain tensors")
    name = f"{len(tensors)}/{where}"
    tensors[name] = plain
    return {"complex" if tensor.is_complex() else "tensor": name}


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value again; raises `Damaged` for what `pack` does not write."""
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if isinstance(packed, list):
        return [unpack(entry, tensors) for entry in packed]
    require(isinstance(packed, dict) and len(packed) == 1, "a value in it is of no kind")
    match packed:
        case {"dict": dict(entries)}:
            return {key: unpack(entry, tensors) for key, entry in entries.items()}
        case {"items": list(entries)}:
            are_pairs = all(isinstance(e, list) and len(e) == 2 and type(e[0]) in (str, int) for e in entries)
            require(are_pairs and len({key for key, _ in entries}) == len(entries), "a dict in it is none")
            return {key: unpack(entry, tensors) for key, entry in entries}
        case {"tuple": list(entries)}:
            return tuple(unpack(entry, tensors) for entry in entries)
        case {"float": str(text)}:
            require(text in ("nan", "inf", "-inf"), f"a number in it is {text!r:.40}")
            return float(text)
        case {"tensor": str(name)} | {"complex": str(name)}:
            require(name in tensors, f"tensor {name!r:.80} is missing")
            return tensors[name] if "tensor" in packed else _complex(name, tensors[name])
    raise Damaged(f"a value in it is a {next(iter(packed))!r:.40}")


def _complex(name: str, parts: Tensor) -> Tensor:
    is_pair = parts.dtype in (torch.float32, torch.float64) and parts.dim() > 0 and parts.shape[-1] == 2
    require(is_pair, f"tensor {name!r:.80} is not of complex numbers")
    return torch.view_as_complex(parts.contiguous())


@dataclass
class Position:
    """Where a run is: updates made, seconds spent, and the sums for the line of the epoch that is under way."""

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
        """The mean over the epoch's steps that had a value; starts the next epoch's."""
        means = {name: total / self.counts[name] for name, total in self.sums.items()}
        self.sums, self.counts, self.count = {}, {}, 0
        return means


def position_in(saved: Mapping[str, Any], path: Path, batches: TrainBatches) -> Position:
    """Where the run was that a checkpoint is of; it has to be a place that this run comes to."""
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

    Of these every process of a run has its own; one more than there were keeps what it has.
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
        if not isinstance(value, Tensor):
            raise Damaged(f"{what} is no tensor")
        same = value.shape == own.shape and value.dtype == own.dtype
        came, wanted = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (value, own))
        require(same, f"{what} is {came}, not {wanted}")
    else:
        require(type(value) is type(own), f"{what} is a {type(value).__name__}, not a {type(own).__name__}")


def _check_optimizer(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """The same groups with the same settings but for the rate, which every step sets; what it keeps for
    each parameter is of its shape.
    """
    own = optimizer.state_dict()
    require(saved.keys() == own.keys(), "the optimiser's state is not one")
    groups, count = saved["param_groups"], len(own["param_groups"])
    require(isinstance(groups, list) and len(groups) == count, f"the optimiser has not {count} groups")
    for theirs, ours in zip(groups, own["param_groups"], strict=True):
        require(isinstance(theirs, dict) and theirs.keys() == ours.keys(), "a group of the optimiser is another one")
        for name in ours.keys() - {"lr"}:
            is_same = theirs[name] == ours[name]
            require(is_same, f"the optimiser's {name} is {theirs[name]!r:.40}, not {ours[name]!r:.40}")
        require(_is_finite(theirs["lr"]), f"the optimiser's lr is {theirs['lr']!r:.40}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = saved["state"]
    require(isinstance(state, dict) and state.keys() <= set(range(len(parameters))), "the optimiser's state is not one")
    means = _MEANS[type(optimizer)]
    for number, entry in state.items():
        is_right = isinstance(entry, dict) and entry.keys() - {"step"} == set(means)
        require(is_right and ("step" in entry) == (len(means) > 1), "the optimiser's state is not one")
        for name in means:
            if entry[name] is not None:
                _check_like(entry[name], parameters[number].detach(), f"the {means[name]} of parameter {number}")
        if "step" in entry:
            _check_like(entry["step"], torch.tensor(0.0), f"the count of steps of parameter {number}")
            require(bool(entry["step"].isfinite()) and entry["step"] >= 0, "the optimiser's count of steps is none")
