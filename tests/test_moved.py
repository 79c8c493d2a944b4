"""Import paths that the docs of earlier versions named lead to the very modules of today."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from decomposable.moved import MOVED

import decomposable as dn

PATHS = {
    "decomposable.artifact": "decomposable.network.artifact",
    "decomposable.bench.measuring": "decomposable.export.measuring",
    "decomposable.forms": "decomposable.core.forms",
    "decomposable.latency": "decomposable_edge.sizing.latency",
    "decomposable.svd": "decomposable.core.svd",
}


@pytest.mark.parametrize(("before", "today"), PATHS.items())
def test_an_old_path_is_the_module_of_today(before, today):
    module = importlib.import_module(before)
    assert module is importlib.import_module(today)
    assert (module.__name__, module.__spec__.name) == (today, today)


def test_the_old_artifact_has_the_public_load():
    artifact = importlib.import_module("decomposable.artifact")
    assert artifact.load is dn.load
    with pytest.raises(AttributeError, match="has no attribute 'unload'"):
        artifact.unload  # noqa: B018


def test_nothing_else_is_kept():
    assert MOVED.keys() == {*PATHS, "decomposable.bench"}
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("decomposable.ranks")


def test_old_paths_work_first_and_in_every_way_of_importing():
    """In a process of its own: what is imported already may hide what is missing."""
    program = """
import sys
import decomposable
assert "torch" not in sys.modules
from decomposable import latency
import decomposable.bench.measuring as measuring
from decomposable.forms import to_matrix
import decomposable.svd
assert latency.__name__ == "decomposable_edge.sizing.latency"
assert measuring.__name__ == "decomposable.export.measuring"
assert decomposable.svd.svd.__module__ == "decomposable.core.svd"
assert sys.modules["decomposable.forms"] is sys.modules["decomposable.core.forms"]
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(dn.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
