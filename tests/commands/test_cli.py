import subprocess
import sys
from pathlib import Path

import pytest

import decomposable
from decomposable.commands import main as cli
from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.interrupts import Interrupted

SOURCE = Path(cli.__file__).parents[2]


def call(*arguments, code=""):
    """Run the command in a process of its own, as a user does."""
    program = ["-c", code] if code else ["-m", "decomposable"]
    return subprocess.run(
        [sys.executable, *program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(SOURCE), "PATH": "", "COLUMNS": "100"},
    )


def lines(text):
    return text.rstrip("\n").split("\n")


@pytest.mark.parametrize("verb", ["", *(verb.name for verb in cli.VERBS)])
def test_help_names_the_verb_and_gives_an_example(verb):
    result = call(*filter(None, [verb, "--help"]))
    assert result.returncode == 0
    assert result.stderr == ""
    assert f"example:\n  decomposable {verb or 'demo'}" in result.stdout


def test_the_example_of_every_verb_is_a_call_that_parses():
    for verb in cli.VERBS:
        for example in verb.example.splitlines():
            program, *arguments = example.split()
            assert program == "decomposable"
            assert cli.parser().parse_args(arguments).verb is verb


@pytest.mark.parametrize("verb", [verb.name for verb in cli.VERBS])
def test_help_imports_nothing_heavy(verb):
    code = f"import sys; from decomposable.commands.main import main; main(['{verb}', '--help']); print(*sys.modules)"
    loaded = set(lines(call(code=code).stdout)[-1].split())
    assert "decomposable.commands.main" in loaded
    assert not loaded & {"torch", "numpy", "sklearn", "matplotlib"}


def test_version():
    result = call("--version")
    assert (result.returncode, result.stdout) == (0, f"decomposable {decomposable.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], ["VERB"]),
        (["dmo"], ["dmo", "demo"]),
        (["demo", "--sed", "1"], ["--sed"]),
        (["demo", "--seed", "one"], ["--seed", "one"]),
        (["demo", "--se", "1"], ["--se"]),  # no abbreviations: a later option would change what they mean
        (["demo", "--runs", "0"], ["runs=0", "at least 1"]),
        (["demo", "--seed", "-1"], ["seed=-1", "from 0"]),
    ],
)
def test_a_wrong_call_is_one_line_on_stderr_and_code_2(arguments, named, capsys):
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(lines(err)) == 1
    assert all(word in err for word in named), err


def test_exit_codes_reach_the_shell():
    assert call("dmo").returncode == 2
    assert call("demo", "--out", "/dev/null/below-a-file").returncode == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgumentError("ratio=2; allowed:\n  a number in (0, 1]"), 2),
        (DecomposableError("layer 'conv': its weight holds NaN"), 1),
        (FileNotFoundError(2, "No such file or directory", "weights.pt"), 1),
    ],
)
def test_an_error_of_a_verb_is_one_line_with_its_code(error, code, monkeypatch, capsys):
    def fail(options):
        raise error

    broken = cli.Verb(name="break", summary="", description="", example="", add_options=lambda parser: None, run=fail)
    monkeypatch.setattr(cli, "VERBS", (broken,))
    assert cli.main(["break"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(lines(err)) == 1
    assert err.startswith("decomposable break: error: ")


def test_an_error_of_our_own_making_is_not_hidden(monkeypatch):
    def fail(options):
        raise RuntimeError("a bug")

    broken = cli.Verb(name="break", summary="", description="", example="", add_options=lambda parser: None, run=fail)
    monkeypatch.setattr(cli, "VERBS", (broken,))
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["break"])


def test_every_verb_takes_json_and_knows_its_command(monkeypatch):
    ran = []
    verb = cli.Verb(name="say", summary="", description="", example="", add_options=lambda parser: None, run=ran.append)
    monkeypatch.setattr(cli, "VERBS", (verb,))
    assert cli.main(["say", "--json"]) == 0
    assert (ran[0].json, ran[0].command) == (True, "decomposable say --json")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "interrupted; the same command goes on"),
        (Interrupted("stopped at step 3 of 9; --resume goes on"), "stopped at step 3 of 9; --resume goes on"),
    ],
)
def test_ctrl_c_is_no_error_but_one_line_and_code_130(error, said, monkeypatch, capsys):
    def fail(options):
        raise error

    broken = cli.Verb(
        name="break",
        summary="",
        description="",
        example="",
        add_options=lambda parser: None,
        run=fail,
        if_interrupted="the same command goes on",
    )
    monkeypatch.setattr(cli, "VERBS", (broken,))
    assert cli.main(["break"]) == 130
    assert capsys.readouterr() == ("", f"decomposable break: {said}\n")


def test_every_verb_takes_quiet_and_verbose_but_not_both(monkeypatch, capsys):
    for verb in cli.VERBS:
        assert cli.main([verb.name, "--help"]) == 0
        out, _ = capsys.readouterr()
        assert "-q, --quiet" in out
        assert "-v, --verbose" in out
    assert cli.main(["demo", "-q", "-v"]) == 2
    assert "not allowed with" in capsys.readouterr().err
