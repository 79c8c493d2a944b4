"""Fixtures for all tests, of the library and of the laboratory."""

import fcntl
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Some virtual machines announce AMX and trap its instructions: a bfloat16 kernel would end the process. Must be set
# before torch runs its first one.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
# As the package itself does it; some tests import ONNX Runtime first.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

CHECKOUT = Path(__file__).resolve().parent


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


def run_python_of(path: Path) -> dict[str, Any]:
    """Run the blocks of a page one after the other, as a reader would type them, and return their names.

    ```python notest is for what cannot run here.
    """
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        first_line = text.count("\n", 0, block.start(1))
        code = compile("\n" * first_line + block[1], str(path), "exec")  # so that an error names the page's line
        exec(code, namespace)
    return namespace


def commands_of(path: Path) -> list[list[str]]:
    """Return the lines of ```sh blocks, each as a list of words; a plain ``` block is for what cannot run here."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


class Pages:
    """The pages of the documentation, and what is in them."""

    run_python_of = staticmethod(run_python_of)
    commands_of = staticmethod(commands_of)


@pytest.fixture
def pages() -> Iterator[type[Pages]]:
    """What a page holds, to be run; methods that it registers are gone after it."""
    from decomposable.training.methods import METHODS

    before = dict(METHODS)
    yield Pages
    METHODS.clear()
    METHODS.update(before)
