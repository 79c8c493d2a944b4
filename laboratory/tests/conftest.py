"""Fixtures for the tests of the laboratory."""

from typing import Any

import pytest


@pytest.fixture
def call(capsys):
    """The command as it is typed: its exit code, and what it wrote to both streams."""
    from decomposable_lab.commands import main as cli

    def call(*arguments: Any) -> tuple[int, str, str]:
        code = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call
