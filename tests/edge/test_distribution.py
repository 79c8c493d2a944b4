"""The two distributions: what their wheels hold, side by side in any order, and the device's without PyTorch."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import zipfile
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from decomposable import __version__
from decomposable_edge import AnySizeSession
from decomposable_edge.errors import how_to_install

CHECKOUT = Path(__file__).resolve().parents[2]
WITHOUT_NETWORK = ("--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")

PROGRAM = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "safetensors", "decomposable"):
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocked())
    installed, bundle, x, out = sys.argv[1:]
    sys.path = [installed, *(p for p in sys.path if "decomposable" not in p and not p.endswith("src"))]
    sys.meta_path = [f for f in sys.meta_path if "editable" not in getattr(f, "__name__", type(f).__name__).lower()]
    import numpy as np
    from decomposable_edge import AnySizeSession
    from decomposable_edge.command import main

    session = AnySizeSession(bundle, macs=0.62, threads=1)
    np.save(out, session.run(np.load(x)))
    assert main(["sizes", bundle]) == 0
    assert main(["bench", bundle, "--seconds", "0", "--sizes", "0.5"]) == 0
    assert all(m.__file__.startswith(installed) for n, m in sys.modules.items() if n.startswith("decomposable"))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy: a build leaves files beside its sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("distribution")
    leave_out = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    for name in ("edge", "src", "laboratory"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=leave_out, symlinks=True)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py", "build_backend.py"):
        shutil.copy(CHECKOUT / name, folder)
    return folder


def pip(*arguments, cwd):
    """What pip says; it must work."""
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def built(checkout, name, folder):
    """The wheel of a folder of the checkout, built without a network."""
    out = checkout / "wheels" / name
    pip("wheel", folder, *WITHOUT_NETWORK, "-w", out, cwd=checkout)
    [wheel] = out.iterdir()
    return wheel


@pytest.fixture(scope="module")
def wheels(checkout):
    """Of the device, of the library and of the laboratory."""
    return {
        name: built(checkout, name, folder)
        for name, folder in (("edge", "./edge"), ("full", "."), ("lab", "./laboratory"))
    }


def holds(wheel):
    """The packages and modules at the top of a wheel, its requirements without extras, and its commands."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
        metadata = next(opened.read(name).decode() for name in names if name.endswith("METADATA"))
        commands = next(opened.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    at_top = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    return at_top, {line.partition(": ")[2] for line in required}, set(commands.split("\n")[1:]) - {""}, names


def test_each_wheel_holds_its_own_package_and_the_library_no_laboratory(wheels):
    packages, required, commands, names = holds(wheels["edge"])
    assert wheels["edge"].name == f"decomposable_edge-{__version__}-py3-none-any.whl"
    assert (packages, required) == ({"decomposable_edge"}, {"numpy>=1.26"})
    assert commands == {"decomposable-edge = decomposable_edge.__main__:main"}
    assert {"decomposable_edge/session.py", "decomposable_edge/py.typed"} <= set(names)

    packages, required, commands, names = holds(wheels["full"])
    assert wheels["full"].name == f"decomposable-{__version__}-py3-none-any.whl"
    assert packages == {"decomposable"}
    assert f"decomposable-edge=={__version__}" in required
    assert commands == {"decomposable = decomposable.__main__:main"}
    assert {"decomposable/core/joint.py", "decomposable/py.typed"} <= set(names)

    packages, required, commands, names = holds(wheels["lab"])
    assert (packages, required) == ({"decomposable_lab"}, {"decomposable"})
    assert commands == {"decomposable-lab = decomposable_lab.commands.main:main"}
    assert {"decomposable_lab/report/page.html", "decomposable_lab/report/page.js"} <= set(names)


def test_no_two_wheels_share_a_file(wheels):
    files = [set(zipfile.ZipFile(wheel).namelist()) for wheel in wheels.values()]
    assert not files[0] & files[1]
    assert not files[0] & files[2]
    assert not files[1] & files[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An empty environment that sees the packages of this one, such as numpy, but none of ours."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


@pytest.mark.slow
def test_they_stand_side_by_side_in_any_order_and_are_removed_one_by_one(wheels, environment, tmp_path):
    python = environment / "bin" / "python"

    def there():
        found = subprocess.run(
            [
                python,
                "-I",
                "-c",
                "import importlib.util as u; print(*[n for n in ('decomposable', 'decomposable_edge') "
                "if u.find_spec(n)])",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return set(found.stdout.split())

    names = {"edge": "decomposable-edge", "full": "decomposable"}
    packages = {"edge": "decomposable_edge", "full": "decomposable"}
    for order in permutations(names):
        for which in order:
            pip("--python", python, "install", *WITHOUT_NETWORK[1:], wheels[which], cwd=tmp_path)
        assert there() == set(packages.values())
        for gone, left in ((order[0], {packages[order[1]]}), (order[1], set())):
            pip("--python", python, "uninstall", "--yes", "--disable-pip-version-check", names[gone], cwd=tmp_path)
            assert there() == left


# What the README's commands are given here: digits in place of CIFAR-10, and trainings of an epoch.
QUICK = {
    r"cifar10-resnet20 --data DIR": "digits",
    r"epochs=\d+": "epochs=1 train_images=200 calibration_images=100",
    r"decomposable bench (.*)": r"decomposable bench \1 --seconds 0 --sizes 0.5",
}
PREPARE = """
    import torch, decomposable as dn
    torch.save(dn.models.small_cnn().state_dict(), "resnet20.pt")
"""


@pytest.mark.slow
def test_from_the_wheels_alone_everything_of_the_readme_works(wheels, environment, tmp_path):
    """Its Python and its commands run in an environment that has both wheels, and other packages but none of ours."""
    python = environment / "bin" / "python"
    for which in ("edge", "full"):
        pip("--python", python, "install", *WITHOUT_NETWORK[1:], wheels[which], cwd=tmp_path)
    packages = Path(np.__file__).parents[
        1
    ]  # PyTorch and so on; .pth files in there, as that of a checkout, do not count
    [site] = (environment / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(f"{packages}\n")
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    where = "import decomposable, decomposable_edge as e; print(decomposable.__file__, e.__file__)"
    assert all(file.startswith(str(site)) for file in run(python, "-I", "-c", where).split())
    text = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    program = "".join(code for language, code in blocks if language == "python")
    assert "resize_" in program
    run(python, "-I", "-c", program)
    run(python, "-I", "-c", textwrap.dedent(PREPARE))
    lines = [line for language, code in blocks if not language for line in code.splitlines()]
    commands = [line for line in lines if line.startswith(("decomposable ", "decomposable-edge "))]
    assert {line.split()[1] for line in commands} >= {"cut", "train", "sizes", "resize", "export", "bench"}
    for line in commands:
        for pattern, quick in QUICK.items():
            line = re.sub(pattern, quick, line)
        name, *arguments = shlex.split(line)
        run(environment / "bin" / name, *arguments)
    run(environment / "bin" / "decomposable-edge", "sizes", "device.safetensors")


def test_an_editable_install_brings_the_device_and_both_commands(checkout):
    out = checkout / "wheels" / "editable"
    program = "import build_backend, sys; print(build_backend.build_editable(sys.argv[1]))"
    out.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=checkout, check=True, capture_output=True)
    [wheel] = out.iterdir()
    _, required, commands, _ = holds(wheel)
    assert not any(each.startswith("decomposable-edge") for each in required)
    assert commands == {
        "decomposable = decomposable.__main__:main",
        "decomposable-edge = decomposable_edge.__main__:main",
    }


def test_it_runs_without_torch_and_without_the_checkout(wheels, tiny, tmp_path):
    with zipfile.ZipFile(wheels["edge"]) as opened:
        opened.extractall(tmp_path / "unpacked")
    copy = shutil.copy(tiny, tmp_path / "tiny.safetensors")
    x = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    arguments = [str(tmp_path / "unpacked"), str(copy), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
    subprocess.run(command, check=True, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL)
    expected = AnySizeSession(tiny, macs=0.62, threads=1).run(x)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected)


def run_the_command(*arguments, before="pass"):
    """As the script of an installed distribution does."""
    program = f"{before}; import sys; from decomposable_edge.__main__ import main; sys.exit(main())"
    variables = {**os.environ, "PYTHONPATH": str(CHECKOUT / "src")}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables)


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
