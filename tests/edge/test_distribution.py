"""The small distribution: its wheel runs a bundle where there is neither PyTorch nor this checkout."""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest

from decomposable import __version__
from decomposable_edge import AnySizeSession
from decomposable_edge.errors import how_to_install

CHECKOUT = Path(__file__).resolve().parents[2]

PROGRAM = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "safetensors"):
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocked())
    unpacked, bundle, x, out = sys.argv[1:]
    sys.path = [unpacked, *(p for p in sys.path if "decomposable" not in p and not p.endswith("src"))]
    sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__name__", type(f).__name__).lower()]
    import numpy as np
    import decomposable
    from decomposable_edge import AnySizeSession
    from decomposable_edge.command import main

    assert decomposable.__file__.startswith(unpacked), decomposable.__file__
    session = AnySizeSession(bundle, macs=0.62, threads=1)
    np.save(out, session.run(np.load(x)))
    assert main(["sizes", bundle]) == 0
    assert main(["bench", bundle, "--seconds", "0", "--sizes", "0.5"]) == 0
    assert all(m.__file__.startswith(unpacked) for n, m in sys.modules.items() if n.startswith("decomposable"))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy: a build leaves files beside its sources. An earlier build has left some already."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("distribution")
    leave_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(CHECKOUT / "edge", folder / "edge", ignore=leave_out)
    shutil.copytree(CHECKOUT / "src" / "decomposable", folder / "src" / "decomposable", ignore=leave_out)
    shutil.copy(CHECKOUT / "LICENSE", folder)
    stale = folder / "edge" / "build" / "lib" / "decomposable" / "edge"
    stale.mkdir(parents=True)
    (stale / "stale.py").write_text("")
    return folder


@pytest.fixture(scope="module")
def wheel(checkout):
    """What is built there."""
    command = [sys.executable, "-m", "pip", "wheel", "./edge", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run(
        [*command, "-w", "out", "--quiet", "--disable-pip-version-check"], cwd=checkout, check=True, capture_output=True
    )
    [built] = (checkout / "out").iterdir()
    return built


def test_a_source_distribution_is_refused_in_one_line(checkout, tmp_path):
    """The sources lie outside of its folder: it would build a wheel that cannot be imported."""
    apart = shutil.copytree(checkout / "edge", tmp_path / "edge")
    for folder in (checkout / "edge", apart):
        command = [sys.executable, "setup.py", "--quiet", "sdist", "--dist-dir", str(tmp_path / "out")]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        assert done.returncode == 1
        assert "decomposable-edge is built from a checkout" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_wheel_holds_no_more_than_a_device_needs(wheel):
    assert wheel.name == f"decomposable_edge-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        sources = {name: opened.read(name).decode() for name in names if name.endswith(".py")}
        [metadata] = [opened.read(name).decode() for name in names if name.endswith("METADATA")]
    assert "decomposable/edge/session.py" in sources
    assert not any("/network/" in name for name in sources)
    assert "decomposable/edge/stale.py" not in sources
    assert "decomposable/LICENSE" in names
    required = {line.split()[1].partition(">")[0] for line in metadata.splitlines() if line.startswith("Requires-Dist")}
    assert required == {"numpy", "onnx", "onnxruntime"}


def test_it_runs_without_torch_and_without_the_checkout(wheel, tiny, tmp_path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "unpacked")
    copy = shutil.copy(tiny, tmp_path / "tiny.safetensors")
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    arguments = [str(tmp_path / "unpacked"), str(copy), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
    subprocess.run(command, check=True, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    expected = AnySizeSession(tiny, macs=0.62, threads=1).run(x)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected)


def test_the_command_comes_with_both_distributions(wheel):
    pyprojecttoml = pytest.importorskip("setuptools.config.pyprojecttoml")
    full = pyprojecttoml.read_configuration(CHECKOUT / "pyproject.toml")["project"]["scripts"]
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith("entry_points.txt")]
        edge = opened.read(name).decode()
    assert f"decomposable-edge = {full['decomposable-edge']}" in edge.splitlines()


def test_the_other_command_says_in_one_line_that_it_is_not_there(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "decomposable", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    assert done.stderr == "decomposable: error: this is decomposable-edge, for devices; use decomposable-edge\n"


def run_the_command(*arguments, before="pass"):
    """As the script of an installed distribution does."""
    program = f"{before}; import sys; from decomposable.__main__ import edge; sys.exit(edge())"
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT / "src")}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_the_command_lists_sizes(tiny):
    done = run_the_command("sizes", str(tiny))
    assert done.returncode == 0, done.stderr
    assert "Any size between the first and the last can be taken." in done.stdout


def test_the_command_without_the_extra_says_so_in_one_line(tiny):
    done = run_the_command("sizes", str(tiny), before="import sys; sys.modules['onnxruntime'] = None")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("decomposable-edge: error: onnxruntime is not installed")
    assert how_to_install("onnx") in done.stderr
