"""The command `decomposable-lab`: what it offers, and what the library says of it."""

import pytest

from decomposable.commands import main as library
from decomposable_lab.commands import main as laboratory


@pytest.mark.parametrize("verb", ["compare", "exhibits", "report", "train", "sizes", "evaluate"])
def test_every_verb_has_a_help_with_an_example(verb, capsys):
    assert laboratory.main([verb, "--help"]) == 0
    assert "example:\n  decomposable-lab" in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["compare", "exhibits", "report"])
def test_the_library_says_in_one_line_where_a_verb_went(verb, capsys):
    assert library.main([verb, "digits"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "decomposable-lab" in err
    assert "pip install" in err


def test_a_method_that_there_is_not_is_refused_with_the_nearest(capsys, tmp_path):
    code = laboratory.main(["train", "digits", "--set", "method=us-nets", "--out", str(tmp_path / "run")])
    assert code == 2
    assert "did you mean us-net?" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
