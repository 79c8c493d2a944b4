"""The pages of the documentation that are the laboratory's: what they show runs."""

from pathlib import Path

import pytest

from decomposable.commands import main as library
from decomposable_lab.commands import main as laboratory

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [DOCS / name for name in ("compare.md", "paper.md", "machines.md")]
PROGRAMS = {"decomposable": library, "decomposable-lab": laboratory}
WITH_COMMANDS = [path for path in PAGES if "```sh" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_of_a_page_runs(path, pages):
    pages.run_python_of(path)


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_of_a_page_are_understood(path, pages):
    for program, *arguments in pages.commands_of(path):
        parser = library.build_parser(program, "", PROGRAMS[program].VERBS, example="")
        assert parser.parse_args(arguments).verb_name == arguments[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_of_a_page_work(path, tmp_path, monkeypatch, capsys, pages):
    """One after the other in one folder."""
    monkeypatch.chdir(tmp_path)
    for program, *arguments in pages.commands_of(path):
        assert PROGRAMS[program].main(arguments) == 0, capsys.readouterr().err
