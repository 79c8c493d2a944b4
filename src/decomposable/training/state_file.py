"""States of a training as files: safetensors with a description in JSON, checksums over all of it, and no pickle.

A state is a tree of dicts, whose keys are text or whole numbers, lists, tuples, numbers, text, None and tensors. It is
written as JSON and a flat list of tensors, and comes back as it was. Anything else is refused when it is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decomposable.network.file.container import DTYPE_NAMES, open_container, write_container
from decomposable_edge.errors import ArtifactError, InvalidArgumentError
from decomposable_edge.fields import Damaged, Fields, require

OBJECTIVE, CHECKPOINT = "objective", "checkpoint"
"""Kinds of states: what a trainer of another library keeps of an objective, and all that a run needs to go on."""

VERSION = 3
"""The version of what is in such a file."""


def write_state(path: Path, state: Mapping[str, Any], kind: str = OBJECTIVE) -> None:
    """Write a state, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    content = {name: pack(value, tensors, name) for name, value in state.items()}
    write_container(path, {"kind": kind, "version": VERSION, "content": content}, tensors)


def read_state(path: Path, kind: str = OBJECTIVE) -> dict[str, Any]:
    """Read what `write_state` wrote, all of it verified."""
    if not path.is_file():
        raise ArtifactError.of(path, f"it is not there; allowed: a file with the {kind} of a training")
    with open_container(path) as container:
        found, version = map(container.description.get, ("kind", "version"))
        require(found == kind, f"it holds a {found!r:.40}; allowed: {kind}")
        require(type(version) is int and version == VERSION, f"it is of version {version!r:.40}, this is {VERSION}")
        content, tensors = Fields(container.description, "it").mapping("content"), container.read_all()
        return {name: unpack(value, tensors) for name, value in content.items()}


def holds(path: Path, kind: str) -> bool:
    """Return whether a file of this package holds a state of this kind."""
    with open_container(path) as container:
        return container.description.get("kind") == kind


def pack(value: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """Return the value as JSON holds it, and add its tensors to `tensors`, under names that begin with a number.

    >>> tensors = {}
    >>> packed = pack({"w": torch.ones(2), "step": (3, [None, 0.5])}, tensors, "state")
    >>> packed
    {'dict': [['w', {'tensor': '0/state/w'}], ['step', {'tuple': [3, [None, 0.5]]}]]}
    >>> unpack(packed, tensors)
    {'w': tensor([1., 1.]), 'step': (3, [None, 0.5])}
    """
    if isinstance(value, Tensor):
        return _pack_tensor(value, tensors, where)
    if isinstance(value, Mapping) and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, pack(entry, tensors, f"{where}/{key}")] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        entries = [pack(entry, tensors, f"{where}/{i}") for i, entry in enumerate(value)]
        return entries if isinstance(value, list) else {"tuple": entries}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    allowed = "tensors, numbers, text, None, and lists, tuples and dicts of these"
    why = f"{where} is a {type(value).__name__}, or has such keys"
    raise InvalidArgumentError.about("checkpoint", where, allowed, why=why)


def _pack_tensor(tensor: Tensor, tensors: dict[str, Tensor], where: str) -> dict[str, str]:
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    if plain.layout is not torch.strided or plain.is_quantized or plain.dtype not in DTYPE_NAMES.values():
        why = f"{where} is {tensor.dtype}, {tensor.layout}"
        raise InvalidArgumentError.about("checkpoint", where, "plain tensors", why=why)
    name = f"{len(tensors)}/{where}"
    tensors[name] = plain
    return {"complex" if tensor.is_complex() else "tensor": name}


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value again; raise `Damaged` for what `pack` does not write."""
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    if isinstance(packed, list):
        return [unpack(entry, tensors) for entry in packed]
    require(isinstance(packed, dict) and len(packed) == 1, "a value in it is of no kind")
    match packed:
        case {"dict": list(entries)}:
            are_pairs = all(isinstance(e, list) and len(e) == 2 and type(e[0]) in (str, int) for e in entries)
            require(are_pairs and len({key for key, _ in entries}) == len(entries), "a dict in it is none")
            return {key: unpack(entry, tensors) for key, entry in entries}
        case {"tuple": list(entries)}:
            return tuple(unpack(entry, tensors) for entry in entries)
        case {"float": "nan" | "inf" | "-inf" as text}:
            return float(text)
        case {"tensor": str(name)} if name in tensors:
            return tensors[name]
        case {"complex": str(name)} if name in tensors:
            parts = tensors[name]
            is_pair = parts.dtype in (torch.float32, torch.float64) and parts.dim() > 0 and parts.shape[-1] == 2
            require(is_pair, f"tensor {name!r:.80} is not of complex numbers")
            return torch.view_as_complex(parts.contiguous())
    raise Damaged(f"a value in it is {packed!r:.80}")
