"""The one way to ONNX Runtime: with its telemetry switched off, unless the user has decided that."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

SWITCH = "ORT_DISABLE_TELEMETRY"
"""ONNX Runtime's own variable. At "1" it writes no device id under the home folder and looks for no host to report to;
it is read when the package is imported, so that it has to be set before."""


def onnx_runtime() -> ModuleType:
    """The package `onnxruntime`; whoever has set the variable, to whatever value, or imported it before, has chosen."""
    os.environ.setdefault(SWITCH, "1")
    import onnxruntime  # optional: here, so that importing this module does not need it

    module: ModuleType = onnxruntime
    return module


def cpu_session(content: bytes, threads: int, *, spins: bool = True) -> Any:
    """A model on the CPU; without `spins`, its threads do not wait for the next run at full speed, slowing others."""
    onnxruntime = onnx_runtime()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 4  # errors are raised; the rest is for its developers
    if not spins:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
