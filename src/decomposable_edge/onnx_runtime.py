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

_CPU = "CPUExecutionProvider"


def onnx_runtime() -> ModuleType:
    """Return the package `onnxruntime`; whoever has set the variable of its telemetry, or imported it before, has
    chosen. At "1" it writes no device id under the home folder, and looks for no host to report to.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # it is read when the package is imported
    import onnxruntime  # optional: here, so that importing this module does not need it

    module: ModuleType = onnxruntime
    return module


def cpu_session(content: bytes, threads: int, *, spins: bool = True) -> Any:
    """Return a model on the CPU; without `spins`, its threads slow no others while they wait for the next run."""
    options = RuntimeOptions.of(threads, None, None).made(spins=spins)
    options.inter_op_num_threads = 1
    return onnx_runtime().InferenceSession(content, options, providers=[_CPU])


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
        """Return the options that a user gives; what is None is as usual."""
        make = _usual if session_options is None else session_options
        if threads is None:
            threads = _checked(make()).intra_op_num_threads or default_threads()
        return cls(threads=check_threads(threads), providers=_check_providers(providers), _make=make)

    def made(self, *, spins: bool = True) -> Any:
        """Return new ``onnxruntime.SessionOptions``; without `spins`, waiting threads slow no others."""
        options = _checked(self._make())
        options.intra_op_num_threads = self.threads
        if not spins:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        return options


def _usual() -> Any:
    options = onnx_runtime().SessionOptions()
    options.log_severity_level = 4  # errors are raised; the rest is for its developers
    return options


def _checked(options: object) -> Any:
    if isinstance(options, onnx_runtime().SessionOptions):
        return options
    came, allowed = type(options).__name__, "an onnxruntime.SessionOptions"
    text = f"session_options: it returned {came}; allowed: {allowed}"
    raise InvalidArgumentError.about("session_options", came, allowed, text)


def default_threads() -> int:
    """Return as many as PyTorch takes by itself, so that both are measured alike: OMP_NUM_THREADS, or the cores."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if wanted.isascii() and wanted.isdigit() and len(wanted) < 9 and int(wanted) >= 1:
        return min(int(wanted), most_threads())
    return usable_cores()


def usable_cores() -> int:
    """Return how many cores this process may use, without the second threads of one; what ONNX Runtime would take."""
    cores = set()
    for cpu in usable_cpus():
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:  # not Linux, or it does not say
            cores.add(str(cpu))
    return len(cores)


def _check_providers(providers: Sequence[Any] | None) -> list[Any]:
    """Return names of ONNX Runtime's, each alone or with its options: it would take the CPU without a word."""
    if providers is None:
        return [_CPU]
    available = onnx_runtime().get_available_providers()
    is_list = isinstance(providers, list | tuple) and bool(providers)
    names = [each[0] if isinstance(each, tuple) and len(each) == 2 else each for each in providers] if is_list else []
    wrong = [name for name in names if name not in available] or ([] if is_list else [providers])
    if wrong:
        allowed = f"a list of {', '.join(available)}"
        text = f"providers: got {wrong[0]!r:.80}; allowed: {allowed}"
        raise InvalidArgumentError.about("providers", wrong[0], allowed, text)
    return list(providers)
