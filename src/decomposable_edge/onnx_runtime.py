"""The one way to ONNX Runtime, and how it is asked to work: checked before a file is read.

Its telemetry is switched off, unless the user has decided that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.machine import check_threads, most_threads, usable_cpus

SWITCH = "ORT_DISABLE_TELEMETRY"
"""ONNX Runtime's own variable. At "1" it writes no device id under the home folder and looks for no host to report to;
it is read when the package is imported, so that it has to be set before."""
_CPU = "CPUExecutionProvider"


def onnx_runtime() -> ModuleType:
    """The package `onnxruntime`; whoever has set the variable, to whatever value, or imported it before, has chosen."""
    os.environ.setdefault(SWITCH, "1")
    import onnxruntime  # optional: here, so that importing this module does not need it

    module: ModuleType = onnxruntime
    return module


def cpu_session(content: bytes, threads: int, *, spins: bool = True) -> Any:
    """A model on the CPU; without `spins`, its threads do not wait for the next run at full speed, slowing others."""
    options = _usual() if spins else _without_spinning(_usual())
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return onnx_runtime().InferenceSession(content, options, providers=[_CPU])


def _usual() -> Any:
    options = onnx_runtime().SessionOptions()
    options.log_severity_level = 4  # errors are raised; the rest is for its developers
    return options


def _without_spinning(options: Any) -> Any:
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


@dataclass(frozen=True, kw_only=True, eq=False)
class RuntimeOptions:
    """Whatever every session is opened with; `threads` is always said, so that it is what runs."""

    threads: int
    providers: list[Any]
    _make: Callable[[], Any]

    @classmethod
    def of(
        cls, threads: int | None, providers: Sequence[Any] | None, session_options: Callable[[], Any] | None
    ) -> RuntimeOptions:
        """Those that a user gives: what is None is as usual."""
        make = _usual if session_options is None else session_options
        if threads is None:
            threads = _checked(make()).intra_op_num_threads or default_threads()
        return cls(threads=check_threads(threads), providers=_check_providers(providers), _make=make)

    def made(self, *, spins: bool = True) -> Any:
        """A new ``onnxruntime.SessionOptions``; without `spins`, of threads that do not slow others while they wait."""
        options = _checked(self._make())
        options.intra_op_num_threads = self.threads
        return options if spins else _without_spinning(options)


def _checked(options: object) -> Any:
    if isinstance(options, onnx_runtime().SessionOptions):
        return options
    raise InvalidArgumentError(
        f"session_options: it returned {type(options).__name__}; allowed: an onnxruntime.SessionOptions"
    )


def default_threads() -> int:
    """As many as PyTorch takes by itself, so that both are measured alike: OMP_NUM_THREADS, or one for each core."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 and int(wanted) >= 1:
        return min(int(wanted), most_threads())
    return usable_cores()


def usable_cores() -> int:
    """How many cores this process may use, without the second threads of one core; what ONNX Runtime would take."""
    cores = set()
    for cpu in usable_cpus():
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:  # not Linux, or it does not say
            cores.add(str(cpu))
    return len(cores)


def _check_providers(providers: Sequence[Any] | None) -> list[Any]:
    """Names of ONNX Runtime's, each alone or with its options: it would fall back to the CPU without a word."""
    if providers is None:
        return [_CPU]
    available = onnx_runtime().get_available_providers()
    is_list = isinstance(providers, list | tuple) and bool(providers)
    names = [each[0] if isinstance(each, tuple) and len(each) == 2 else each for each in providers] if is_list else []
    wrong = next((name for name in names if name not in available), None)
    if not is_list or wrong is not None:
        came = repr(wrong if is_list else providers)
        raise InvalidArgumentError(f"providers: got {came:.80}; allowed: a list of {', '.join(available)}")
    return list(providers)
