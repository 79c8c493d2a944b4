"""A tree of values and tensors as JSON and a flat list of tensors, and back: what a checkpoint consists of.

Dicts, lists, tuples, numbers, text, None and tensors come back as what they were; a dict's keys are text or whole
numbers. What is none of these is refused when it is packed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from decomposable.errors import InvalidArgumentError
from decomposable.fields import require
from decomposable.network.file.header import DTYPES


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
    if plain.layout is not torch.strided or plain.is_quantized or plain.dtype not in DTYPES.values():
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
    [(kind, content)] = packed.items()
    require(kind in _KINDS and isinstance(content, _KINDS[kind][0]), f"a value in it is a {kind!r:.40}")
    return _KINDS[kind][1](content, tensors)


def _tensor(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    require(name in tensors, f"tensor {name!r:.80} is missing")
    return tensors[name]


def _complex(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    parts = _tensor(name, tensors)
    is_pair = parts.dtype in (torch.float32, torch.float64) and parts.dim() > 0 and parts.shape[-1] == 2
    require(is_pair, f"tensor {name!r:.80} is not of complex numbers")
    return torch.view_as_complex(parts.contiguous())


def _float(text: str, tensors: Mapping[str, Tensor]) -> float:
    require(text in ("nan", "inf", "-inf"), f"a number in it is {text!r:.40}")
    return float(text)


def _items(entries: list[Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    are_pairs = all(isinstance(e, list) and len(e) == 2 and type(e[0]) in (str, int) for e in entries)
    require(are_pairs and len({key for key, _ in entries}) == len(entries), "a dict in it is none")
    return {key: unpack(entry, tensors) for key, entry in entries}


def _dict(entries: dict[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {key: unpack(entry, tensors) for key, entry in entries.items()}


def _tuple(entries: list[Any], tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple(unpack(entry, tensors) for entry in entries)


_KINDS: dict[str, tuple[type, Callable[[Any, Mapping[str, Tensor]], Any]]] = {
    "tensor": (str, _tensor),
    "complex": (str, _complex),
    "float": (str, _float),
    "items": (list, _items),
    "dict": (dict, _dict),
    "tuple": (list, _tuple),
}
