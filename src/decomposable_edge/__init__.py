"""Run a network at any size on a device, without PyTorch: `AnySizeSession`.

The package has the runtime of a device, and below it what the device shares with `decomposable`: choosing a size
(`sizing/`), the file (`file/`), and small modules such as errors, checks and console. Those need numpy only. The
runtime needs the extra `onnx`, and is loaded on first use:

realising     what a network consists of at one size
device_graph  the graph in a file, as bytes
onnx_model    the same as an ONNX model, checked
network       what a file holds, every claim checked
graph         where its graph has the decomposed layers
recurrent     recurrent layers, as an operator or as a loop over the steps
weights       factors and dense weights of a layer, and batch normalisation
building      the ONNX model of one size
feeding       what goes into it, checked
onnx_runtime  how ONNX Runtime is asked to work
session       the session, and changing its size under load
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decomposable_edge.network import Port as Port
    from decomposable_edge.session import AnySizeSession as AnySizeSession

__version__ = "0.1.0.dev0"
__all__ = ["AnySizeSession", "Port"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'decomposable_edge' has no attribute {name!r}")
    from decomposable_edge.errors import needs_extra

    with needs_extra():
        home = import_module("decomposable_edge.session" if name == "AnySizeSession" else "decomposable_edge.network")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
