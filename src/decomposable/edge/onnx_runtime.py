"""The one way to ONNX Runtime: with its telemetry switched off, unless the user has decided that."""

from __future__ import annotations

import os
from types import ModuleType

SWITCH = "ORT_DISABLE_TELEMETRY"
"""ONNX Runtime's own variable. At "1" it writes no device id under the home folder and looks for no host to report to;
it is read when the package is imported, so that it has to be set before."""


def onnx_runtime() -> ModuleType:
    """The package `onnxruntime`; whoever has set the variable, to whatever value, or imported it before, has chosen."""
    os.environ.setdefault(SWITCH, "1")
    import onnxruntime  # optional: here, so that importing this module does not need it

    module: ModuleType = onnxruntime
    return module
