"""ONNX Runtime reports to nobody when it is used through this package, unless the user wants it to."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SESSION = """
import sys
from decomposable_edge import AnySizeSession
session = AnySizeSession(sys.argv[1], macs=0.6)
"""
TOOLS = """
from onnx import TensorProto, helper
from decomposable.export.checking import onnx_runner
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "graph", [x], [y])
onnx_runner(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10))
"""


def run(program, bundle, home, *before, **variables):
    home.mkdir(exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")}
    environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    command = [*before, sys.executable, "-c", program, str(bundle)]
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True)


def written(home):
    return [path.relative_to(home) for path in home.rglob("*") if "torch" not in path.parts]


@pytest.mark.slow
@pytest.mark.parametrize("program", [SESSION, TOOLS], ids=["session", "export"])
def test_nothing_is_written_under_the_home_folder(program, bundle, tmp_path):
    run(program, bundle, tmp_path / "home")
    assert written(tmp_path / "home") == []


def test_who_has_set_the_variable_has_decided(bundle, tmp_path):
    """The same with the runtime's own way: this is what would be written, and the other test could find it."""
    run(SESSION, bundle, tmp_path / "home", ORT_DISABLE_TELEMETRY="0")
    found = written(tmp_path / "home")
    if not found:
        pytest.skip("this ONNX Runtime has no telemetry")
    assert any(path.name == "deviceid" for path in found)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_no_host_is_looked_up(bundle, tmp_path):
    """Not one socket of the internet is opened: a name cannot be looked up without."""
    log = tmp_path / "log"
    try:
        run(SESSION, bundle, tmp_path / "home", "strace", "-f", "-qq", "-e", "trace=network", "-o", str(log))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"strace cannot trace here: {error.stderr[-200:]}")
    assert "AF_INET" not in log.read_text()


def test_all_of_our_code_goes_through_one_place():
    """Whoever imports it first decides what the others get."""
    direct = re.compile(r"^\s*(import onnxruntime|from onnxruntime)", re.MULTILINE)
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [path.name for path in files if direct.search(path.read_text())] == ["onnx_runtime.py"]
