"""Fixtures for the tests of the library."""

import sys
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def without_graphs(request, monkeypatch):
    """Most tests save networks that no device opens: by default `net.save` leaves the graph out here, which takes
    seconds. Tests of the graph say ``onnx=True``, or call `export_any_size`.
    """
    decomposed = sys.modules.get("decomposable.network.decomposed")
    is_documentation = request.node.path.name == "test_examples.py"  # which runs as users would
    if decomposed is not None and not is_documentation:
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
