"""How a network is called: what its inputs are, where in a batch they lie, and which arguments they become.

    batch {"ids": a, "mask": b, "label": c} ── picked ──▶ {"ids": a, "mask": b} ── run ──▶ net(a, attention_mask=b)

By default a network is called with the first entry of a batch, and its one input is called "input". `capture.py` finds
out how it is called by watching a pass. A file says it in JSON, which is written and read here: the default is
``"input"`` alone, any other call is in ``"call"``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from decomposable.core.tracing import Entry, first_entry, map_entries
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.fields import MOST, Damaged, Fields, require
from decomposable_edge.file.header import CODES

INPUT = "input"
"""What the one input of a network is called that takes the first entry of a batch."""

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_SINGLE = (type(None), bool, int, float, str)
_MOST_NUMBERS = 1 << 28  # of one sample in a file: nobody is made to take memory for a claim
_MOST_INPUTS, _MOST_DEPTH = 1000, 20


@dataclass(frozen=True, kw_only=True)
class InputSpec:
    """What a network takes: the shape of one sample, without the batch, and the name of the type.

    `values` are the smallest and the largest whole number that it may be given, where it takes whole numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    values: tuple[int, int] = (0, 1)

    @classmethod
    def of(cls, batch: Any) -> InputSpec | None:
        """Return the input of a batch: a tensor, or its first entry; None for anything else."""
        first = first_entry(batch)
        return cls.of_tensor(first) if isinstance(first, Tensor) and first.dim() > 0 else None

    @classmethod
    def of_tensor(cls, tensor: Tensor) -> InputSpec:
        """Return the input that a batch of samples is."""
        shape, dtype = tuple(tensor.shape[1:]), str(tensor.dtype).removeprefix("torch.")
        if tensor.dtype not in _WHOLE or not tensor.numel() or tensor.is_meta:
            return cls(shape=shape, dtype=dtype)
        least, most = (int(value) for value in torch.aminmax(tensor))
        return cls(shape=shape, dtype=dtype, values=(min(0, least), max(0, most)))

    def example(self, batch: int, seed: int = 0) -> Tensor:
        """Return a made-up batch, the same every time: normal numbers, or whole ones within `values`.

        >>> InputSpec(shape=(3, 8, 8), dtype="float32").example(2).shape
        torch.Size([2, 3, 8, 8])
        """
        dtype: torch.dtype = getattr(torch, self.dtype)
        generator = torch.Generator().manual_seed(seed)
        if dtype.is_floating_point:
            return torch.randn(batch, *self.shape, generator=generator).to(dtype)
        least, most = self.values
        return torch.randint(least, most + 1, (batch, *self.shape), generator=generator).to(dtype)

    def described(self) -> dict[str, Any]:
        """Return it as JSON."""
        entry = {"shape": list(self.shape), "dtype": self.dtype}
        return entry if self.values == (0, 1) else {**entry, "values": list(self.values)}

    @classmethod
    def read(cls, record: Fields) -> InputSpec:
        """Return what a file says, checked."""
        shape, dtype, where = record.integers("shape"), record.text("dtype"), record.where
        require(dtype in CODES, f"'dtype' of {where} is {dtype!r:.60}, not a type that can be stored")
        is_right = 0 < math.prod(shape) <= _MOST_NUMBERS
        require(is_right, f"'shape' of {where} is {shape!r:.60}, not that of one sample")
        values = record.get("values") if record.has("values") else [0, 1]
        is_right = isinstance(values, list) and [type(v) for v in values] == [int, int]
        is_right = is_right and -MOST < values[0] <= values[1] < MOST
        require(is_right, f"'values' of {where} is {values!r:.60}, not two whole numbers")
        return cls(shape=tuple(shape), dtype=dtype, values=(values[0], values[1]))


@dataclass(frozen=True)
class Slot:
    """The place of an input among the arguments of a call."""

    name: str


@dataclass(frozen=True, kw_only=True)
class CallSignature:
    """How a network is called.

    Attributes:
        inputs: what they are, by name, in the order of the arguments.
        entries: where in a batch each lies; None where the one input is the first entry.
        args, kwargs: the arguments, with a `Slot` wherever an input goes; all else in them is always the same.
    """

    inputs: Mapping[str, InputSpec]
    entries: Mapping[str, Entry] | None = None
    args: tuple[Any, ...] = (Slot(INPUT),)
    kwargs: Mapping[str, Any]

    @classmethod
    def with_first(cls, spec: InputSpec) -> CallSignature:
        """Return the default: with the first entry of a batch and nothing else."""
        return cls(inputs={INPUT: spec}, kwargs={})

    @property
    def is_default(self) -> bool:
        """Return whether a network is called in the default way."""
        return self.entries is None

    def picked(self, batch: Any) -> dict[str, Any]:
        """Return the inputs in a batch, by name."""
        if self.entries is None:
            return {INPUT: first_entry(batch)}
        return {name: _at(batch, entry) for name, entry in self.entries.items()}

    def run(self, net: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """Return what the network gives for these inputs."""

        def filled(value: Any, _: Entry) -> Any:
            return inputs[value.name] if isinstance(value, Slot) else value

        return net(*map_entries(filled, self.args), **map_entries(filled, self.kwargs))

    def forward(self, net: nn.Module, batch: Any) -> Any:
        """Return what the network gives for a batch, as ``forward(net, batch)`` of `decompose` does."""
        return self.run(net, self.picked(batch))

    def example(self, batch: int) -> dict[str, Tensor]:
        """Return made-up inputs of so many samples, the same every time."""
        return {name: spec.example(batch, seed) for seed, (name, spec) in enumerate(self.inputs.items())}


def _at(batch: Any, entry: Entry) -> Any:
    try:
        for key in entry:
            batch = batch[key]
        return batch
    except (KeyError, IndexError, TypeError):
        where = "".join(f"[{part!r}]" for part in entry)
        why = f"it has no entry {where}, which the network takes"
        raise InvalidArgumentError.about("batch", where, "one made as the example input was", why=why) from None


def describe_call(call: CallSignature | None) -> dict[str, Any]:
    """Return the fields of a file's description that say how the network is called."""
    if call is None or call.entries is None:
        return {"input": None if call is None else call.inputs[INPUT].described()}
    inputs = [
        {"name": name, "entry": list(call.entries[name]), **spec.described()} for name, spec in call.inputs.items()
    ]
    kwargs = {name: _as_json(value) for name, value in call.kwargs.items()}
    return {"input": None, "call": {"inputs": inputs, "args": list(map(_as_json, call.args)), "kwargs": kwargs}}


def _as_json(value: Any) -> dict[str, Any]:
    """Return an argument with its kind before it: a text may be any, so that no text can stand for an input."""
    if isinstance(value, Slot):
        return {"input": value.name}
    if isinstance(value, dict):
        return {"dict": {key: _as_json(part) for key, part in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: list(map(_as_json, value))}
    return {"value": value}


def read_call(top: Fields) -> CallSignature | None:
    """Return how the network of a file is called; None where the file does not know. All of it is checked."""
    if top.get("input") is not None:
        return CallSignature.with_first(InputSpec.read(Fields(top.get("input"), "input")))
    if not top.has("call"):
        return None
    record = Fields(top.get("call"), "call")
    records = record.record_list("inputs")
    require(0 < len(records) <= _MOST_INPUTS, f"'inputs' of call are {len(records)}")
    names = [each.text("name") for each in records]
    require(all(map(str.isidentifier, names)) and len(set(names)) == len(names), "an input has no name, or one twice")
    inputs = dict(zip(names, map(InputSpec.read, records), strict=True))
    require(sum(math.prod(spec.shape) for spec in inputs.values()) <= _MOST_NUMBERS, "the inputs are too large")
    args, kwargs = record.get("args"), record.mapping("kwargs")
    require(isinstance(args, list), "'args' of call is not a list")
    unused = set(names)
    call = CallSignature(
        inputs=inputs,
        entries=dict(zip(names, map(_read_entry, records), strict=True)),
        args=tuple(_read_argument(value, inputs, unused) for value in args),
        kwargs={name: _read_argument(value, inputs, unused) for name, value in kwargs.items()},
    )
    require(not unused, "an input is no argument")
    return call


def _read_entry(record: Fields) -> Entry:
    found = record.get("entry")
    is_right = isinstance(found, list) and all(type(key) in (str, int) for key in found)
    require(is_right, f"'entry' of {record.where} is {found!r:.60}, not a place in a batch")
    return tuple(found)


def _read_argument(value: object, inputs: Mapping[str, InputSpec], unused: set[str], depth: int = 0) -> Any:
    """Return the argument that `_as_json` made this of; inputs in it are taken out of `unused`."""
    if isinstance(value, dict) and len(value) == 1 and depth < _MOST_DEPTH:
        match next(iter(value.items())):
            case "input", str(name) if name in inputs:
                unused.discard(name)
                return Slot(name)
            case "value", single if type(single) in _SINGLE:
                return single
            case "list" | "tuple" as kind, list(parts):
                read = [_read_argument(part, inputs, unused, depth + 1) for part in parts]
                return read if kind == "list" else tuple(read)
            case "dict", dict(parts):
                return {key: _read_argument(part, inputs, unused, depth + 1) for key, part in parts.items()}
    raise Damaged(f"an argument of call is {value!r:.60}")
