"""Saving a network: with the graph that a device needs, where it can have one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from decomposable.core.tracing import Forward
from decomposable.progress import Report
from decomposable_edge.errors import InvalidArgumentError, UnknownOptionError
from decomposable_edge.file.container import FilePath
from decomposable_edge.text import one_line

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from decomposable.network.decomposed import DecomposedNet


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What was written. `without_onnx` says why a device cannot open it; None where it can."""

    path: Path
    bytes: int
    without_onnx: str | None = None

    def __str__(self) -> str:
        text = f"{self.path}: {self.bytes:,} bytes"
        return text if self.without_onnx is None else f"{text}; not for devices: {self.without_onnx}"


class GraphKeywords(TypedDict, total=False):
    """How the graph for devices is made, as `export_onnx` takes it."""

    example_input: Any
    forward: Forward | None
    dynamic: Mapping[str, Mapping[int, str]] | None
    tolerance: float
    progress: Report | None


def saved(
    net: DecomposedNet, path: FilePath, info: Mapping[str, Any] | None, onnx: bool | None, **how: Unpack[GraphKeywords]
) -> SaveReport:
    """Write the file of a network, and return what was written."""
    if onnx not in (True, False, None):
        raise InvalidArgumentError.about("onnx", onnx, "True, False, or None for where it can be")
    allowed = tuple(GraphKeywords.__annotations__)
    for name in how:
        if name not in allowed:
            raise UnknownOptionError.about(name, how.get(name), f"info, onnx, {', '.join(allowed)}")
    if how and onnx is False:
        came = " and ".join(f"{name}=" for name in how)
        raise InvalidArgumentError.about("onnx", False, "onnx=True", why=f"False leaves the graph out, but got {came}")
    onnx = True if how else onnx
    reason = "onnx=False"
    if onnx is None and net.call is None:
        reason = net.unclear or "it is not known what the network takes; decompose(model, example_input=...) tells it"
    elif onnx is not False:
        # Exports are above this room: they know networks, and networks ask for one by name.
        exporting = import_module("decomposable.export.any_size")
        try:
            return SaveReport(path=Path(path), bytes=exporting.save_for_devices(net, path, info, **how))
        except Exception as error:  # exporters of others raise many kinds
            if onnx or isinstance(error, OSError):
                raise
            reason = one_line(error)
    size = replace(net.artifact(), graph=None).save(path, info)
    return SaveReport(path=Path(path), bytes=size, without_onnx=reason)
