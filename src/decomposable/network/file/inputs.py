"""How a network is called, in a file: what `calls.Call` is, as JSON.

A network that takes the first entry of a batch has ``"input"`` alone; any other call is in ``"call"``.
"""

from __future__ import annotations

import math
from typing import Any

from decomposable.network.calls import INPUT, CallSignature, Entry, InputSpec, Slot
from decomposable.network.file.container import DTYPE_NAMES
from decomposable_edge.fields import MOST, Damaged, Fields, require

_MOST_NUMBERS = 1 << 28  # of one sample: nobody is made to take memory for a claim
_MOST_INPUTS, _MOST_DEPTH = 1000, 20
_SINGLE = (bool, int, float, str)


def call_entries(call: CallSignature | None, unclear: str | None) -> dict[str, Any]:
    """The fields of a description that say how the network is called."""
    entries: dict[str, Any] = {"input": None}
    if call is not None and call.is_default:
        entries["input"] = _spec_entry(call.inputs[INPUT])
    elif call is not None:
        assert call.entries is not None
        entries["call"] = {
            "inputs": [
                {"name": name, "entry": list(call.entries[name]), **_spec_entry(spec)}
                for name, spec in call.inputs.items()
            ],
            "args": [_as_json(value) for value in call.args],
            "kwargs": {name: _as_json(value) for name, value in call.kwargs.items()},
        }
    return entries if unclear is None else {**entries, "unclear": unclear}


def _spec_entry(spec: InputSpec) -> dict[str, Any]:
    entry = {"shape": list(spec.shape), "dtype": spec.dtype}
    return entry if spec.values == (0, 1) else {**entry, "values": list(spec.values)}


def _as_json(value: Any) -> dict[str, Any]:
    """An argument; what it is stands before it, because a text may be any."""
    if isinstance(value, Slot):
        return {"input": value.name}
    if isinstance(value, dict):
        return {"dict": {key: _as_json(part) for key, part in value.items()}}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_as_json(part) for part in value]}
    return {"value": value}


def read_call(top: Fields) -> CallSignature | None:
    """How the network of a file is called; None where the file does not know."""
    if top.get("input") is not None:
        return CallSignature.with_first(_read_spec(Fields(top.get("input"), "input")))
    if not top.has("call"):
        return None
    record = Fields(top.get("call"), "call")
    records = record.record_list("inputs")
    require(0 < len(records) <= _MOST_INPUTS, f"'inputs' of call are {len(records)}")
    names = [each.text("name") for each in records]
    require(all(map(str.isidentifier, names)) and len(set(names)) == len(names), "an input has no name, or one twice")
    inputs = dict(zip(names, map(_read_spec, records), strict=True))
    require(sum(math.prod(spec.shape) for spec in inputs.values()) <= _MOST_NUMBERS, "the inputs are too large")
    args, kwargs = record.get("args"), record.mapping("kwargs")
    require(isinstance(args, list), "'args' of call is not a list")
    used: set[str] = set()
    call = CallSignature(
        inputs=inputs,
        entries=dict(zip(names, map(_read_entry, records), strict=True)),
        args=tuple(_read_argument(value, names, used) for value in args),
        kwargs={name: _read_argument(value, names, used) for name, value in kwargs.items()},
    )
    require(used == set(names), "an input is no argument")
    return call


def _read_spec(record: Fields) -> InputSpec:
    shape, dtype = record.integers("shape"), record.text("dtype")
    require(dtype in DTYPE_NAMES, f"'dtype' of {record.where} is {dtype!r:.60}, not a type that can be stored")
    is_right = 0 < math.prod(shape) <= _MOST_NUMBERS
    require(is_right, f"'shape' of {record.where} is {shape!r:.60}, not that of one sample")
    values = record.get("values") if record.has("values") else [0, 1]
    is_pair = isinstance(values, list) and len(values) == 2 and all(type(v) is int and -MOST < v < MOST for v in values)
    require(is_pair and values[0] <= values[1], f"'values' of {record.where} is {values!r:.60}, not two whole numbers")
    return InputSpec(shape=tuple(shape), dtype=dtype, values=(values[0], values[1]))


def _read_entry(record: Fields) -> Entry:
    found = record.get("entry")
    is_right = isinstance(found, list) and all(type(key) in (str, int) for key in found)
    require(is_right, f"'entry' of {record.where} is {found!r:.60}, not a place in a batch")
    return tuple(found)


def _read_argument(value: object, names: list[str], used: set[str], depth: int = 0) -> Any:
    is_one = isinstance(value, dict) and len(value) == 1 and depth < _MOST_DEPTH
    require(is_one, f"an argument of call is {value!r:.60}")
    assert isinstance(value, dict)
    [(kind, content)] = value.items()
    if kind == "input" and content in names:
        used.add(content)
        return Slot(content)
    if kind == "value" and (content is None or type(content) in _SINGLE):
        return content
    if kind in ("list", "tuple") and isinstance(content, list):
        parts = [_read_argument(part, names, used, depth + 1) for part in content]
        return parts if kind == "list" else tuple(parts)
    if kind == "dict" and isinstance(content, dict):
        return {key: _read_argument(part, names, used, depth + 1) for key, part in content.items()}
    raise Damaged(f"an argument of call is {value!r:.60}")
