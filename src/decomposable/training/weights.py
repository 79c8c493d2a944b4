"""Start from weights that somebody else trained: a state dict in any of the files it comes in."""

from __future__ import annotations

import hashlib
import os
import re
import warnings
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from decomposable.network import artifact
from decomposable.training.checkpoint import read_checkpoint
from decomposable.training.state_file import CHECKPOINT, holds
from decomposable_edge.errors import FileError
from decomposable_edge.fields import Damaged
from decomposable_edge.file.header import parse_header, read_header
from decomposable_edge.text import one_line

_WRAPPERS = ("state_dict", "model_state_dict", "model", "net")
_PREFIXES = ("module.", "_orig_mod.", "model.")  # the last of methods that train a network around the model


class WeightsError(FileError):
    """A file holds no weights, or not those of this model."""


def load_weights_(model: nn.Module, path: Path) -> None:
    """Put the weights of a file into the model, all of them or none.

    The file is a `.safetensors` state dict, a network of ours (its full size), or what `torch.save` wrote, of
    which only tensors and plain values are read; keys may start with the ``module.`` of data parallelism.
    """
    ours, state = model.state_dict(), read_weights(path)
    while state and not ours.keys() & state.keys() and all(name.startswith(_PREFIXES) for name in state):
        state = {name.partition(".")[2]: value for name, value in state.items()}
    _check(model, state, path)
    # Files from before PyTorch 0.4 do not count batches.
    model.load_state_dict({name: state.get(name, value) for name, value in ours.items()})


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the state dict in a file."""
    _require_file(path)
    with path.open("rb") as file:
        is_safetensors = path.suffix == ".safetensors" or file.read(9)[8:] == b"{"  # a checkpoint of ours is one, too
    return _read_safetensors(path) if is_safetensors else _read_torch(path)


def _require_file(path: Path) -> None:
    if not path.is_file():
        allowed = "a state dict (.safetensors, .pt, .pth) or a network of ours"
        raise WeightsError.of(path, f"no such file; allowed: {allowed}")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with FileIO(path, "rb") as header:  # safetensors takes one that needs far more memory than the file
            parse_header(read_header(header), os.fstat(header.fileno()).st_size)
        with safe_open(path, framework="pt") as file:
            if "decomposable" not in (file.metadata() or {}):
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Damaged as error:
        raise WeightsError.of(path, one_line(error)) from error
    except SafetensorError as error:
        raise WeightsError.of(path, f"not a whole safetensors file ({one_line(error)})") from error
    if holds(path, CHECKPOINT):
        return {name: value for name, value in read_checkpoint(path)["model"].items() if isinstance(value, Tensor)}
    return dict(artifact.read(path).state)


def _read_torch(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        is_zip = file.read(2) == b"PK"  # files from before PyTorch 1.6 are none, and cannot be mapped into memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is said of TorchScript is said again as an error
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # on noise, it fails in any way there is
        name = re.search(r"GLOBAL (\S+)", str(error))  # torch's own words go on to tell how to run it all the same
        reason = f"it names {name[1]:.100}" if name else f"it is damaged, or not of torch.save ({type(error).__name__})"
        raise WeightsError.of(path, f"it holds no weights: {reason}; allowed: tensors and plain values") from error
    for wrapper in _WRAPPERS:  # among the things that people save
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    is_state = isinstance(content, Mapping) and all(isinstance(name, str) for name in content)
    if not is_state or not content or not all(map(_is_plain, content.values())):
        came = "a dict of other things" if isinstance(content, Mapping) else f"a {type(content).__name__}"
        raise WeightsError.of(path, f"it holds {came}; allowed: a state dict, which maps names to tensors")
    return dict(content)


def _is_plain(value: Any) -> bool:
    """Return whether it is a tensor with its numbers here, one for each entry."""
    return isinstance(value, Tensor) and value.layout is torch.strided and value.is_cpu and not value.is_quantized


def _check(model: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Say what is different in one line; torch would list every key."""
    ours = model.state_dict()
    for name, value in ours.items():
        if name in state and state[name].shape != value.shape:
            theirs, wanted = tuple(state[name].shape), tuple(value.shape)
            last = [n for n, p in model.named_parameters() if p.dim() == 2][-1:]
            classes = " (another number of classes?)" if [name] == last else ""
            raise WeightsError.of(path, f"'{name}' has shape {theirs}, the model's {wanted}{classes}")
    missing = [name for name in ours if name not in state and not name.endswith("num_batches_tracked")]
    extra = [name for name in state if name not in ours]
    if missing or extra:
        parts = [f"{len(missing)} weights are missing, such as '{missing[0]}'"] if missing else []
        parts += [f"{len(extra)} are not the model's, such as '{extra[0]}'"] if extra else []
        raise WeightsError.of(path, f"it is of another model: {'; '.join(parts)}")


def sha256(path: Path) -> str:
    """Return the checksum of a file with weights."""
    _require_file(path)
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
