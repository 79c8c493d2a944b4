"""Fixtures for the tests of the library."""

import copy
import sys
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def without_graphs(request, monkeypatch):
    """Most tests save networks that no device opens: by default `net.save` leaves the graph out here, which takes
    seconds. Tests of the graph say ``onnx=True``, or call `save_with_graph`.
    """
    decomposed = sys.modules.get("decomposable.network.decomposed")
    is_documentation = request.node.path.name == "test_examples.py"  # which runs as users would
    if decomposed is not None and not is_documentation:
        monkeypatch.setitem(decomposed.DecomposedNet.save.__kwdefaults__, "onnx", False)


@pytest.fixture(autouse=True)
def one_table_of_operators():
    """Make PyTorch's exporter build its table of ONNX operators once a process, not in every export.

    Building it takes a second, and hundreds of tests export. Each export gets a copy, so that none changes another's.
    """
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is not None and not hasattr(registration, "tables"):
        registration.tables = {}
        build = registration.ONNXRegistry.from_torchlib.__func__

        def from_torchlib(cls, *arguments, **options):
            key = (cls, arguments, tuple(options.items()))
            if key not in registration.tables:
                registration.tables[key] = build(cls, *arguments, **options)
            table = copy.copy(registration.tables[key])
            table.functions = {target: list(found) for target, found in table.functions.items()}
            return table

        registration.ONNXRegistry.from_torchlib = classmethod(from_torchlib)


@pytest.fixture
def call(capsys):
    """The command as it is typed: its exit code, and what it wrote to both streams."""
    from decomposable.commands import main as cli

    def call(*arguments: Any) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call
