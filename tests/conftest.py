"""Fixtures for all tests."""

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Some virtual machines announce AMX and trap its instructions: a bfloat16 kernel would end the process. Must be set
# before torch runs its first one.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# As the package itself does it; some tests import ONNX Runtime first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

CHECKOUT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """A function that makes a folder once for all processes that run tests: what it holds must not be changed.

    It takes a name and what fills the folder, which returns something that JSON holds; the folder and that come back.
    """

    def made(name: str, fill: Callable[[Path], Any]) -> tuple[Path, Any]:
        base = tmp_path_factory.getbasetemp()
        folder = (base if os.environ.get("PYTEST_XDIST_WORKER") is None else base.parent) / f"once-{name}"
        folder.mkdir(exist_ok=True)
        result = folder / "result.json"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.exists():
                result.write_text(json.dumps(fill(folder / "made")))
        return folder / "made", json.loads(result.read_text())

    return made


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real images and weights; a test that asks for it is skipped where there is none."""
    variable = os.environ.get("DECOMPOSABLE_SHARED_DATA")
    folder = Path(variable) if variable else CHECKOUT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: {folder} is not a folder (set DECOMPOSABLE_SHARED_DATA to another)")
    return folder


@pytest.fixture(autouse=True)
def without_graphs(monkeypatch):
    """Most tests save networks that no device opens: by default `net.save` leaves the graph out here, which takes
    seconds. Tests of the graph say ``onnx=True``, or call `export_any_size`.
    """
    decomposed = sys.modules.get("decomposable.network.decomposed")
    if decomposed is not None:
        monkeypatch.setitem(decomposed.DecomposedNet.save.__kwdefaults__, "onnx", False)


@pytest.fixture
def call(capsys):
    """The command as it is typed: its exit code, and what it wrote to both streams."""
    from decomposable.commands import main as cli

    def call(*arguments: Any) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call
