import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import decomposable as dn
from decomposable.commands import main as cli

CHECKOUT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((CHECKOUT / "examples").glob("*.py"))
ALL_PAGES = sorted((CHECKOUT / "docs").glob("*.md"))
OF_THE_LABORATORY = ("compare.md", "paper.md", "machines.md")  # laboratory/tests/test_pages.py runs them
PAGES = [path for path in ALL_PAGES if path.name not in OF_THE_LABORATORY]
READMES = [
    CHECKOUT / "README.md",
    CHECKOUT / "CONTRIBUTING.md",
    CHECKOUT / "results" / "README.md",
    CHECKOUT / "laboratory" / "README.md",
]
SOURCE = Path(dn.__file__).parents[1]


NEEDS = {  # examples and pages that need an extra; what that warns of is its own
    "transformers_trainer.py": "transformers",
    "lightning_module.py": "lightning",
    "transformers.md": "transformers",
    "lightning.md": "lightning",
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_without_a_warning(path, tmp_path):
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name], reason=f"the extra for {path.name} is not installed")
    strict = () if path.name in NEEDS else ("-W", "error")
    result = subprocess.run(
        [sys.executable, *strict, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert result.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_was_extracted_and_saved_is_loaded_again(tmp_path):
    program = CHECKOUT / "examples" / "resize_and_extract.py"
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert "the output is the same: True" in result.stdout, result.stderr
    assert (tmp_path / "small.pt").stat().st_size > 0


SLOW_PAGES = ("deploy.md",)  # what it does is also done by tests/export, tests/edge and the Python of the README


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow if path.name in SLOW_PAGES else []) for path in PAGES],
    ids=lambda path: path.name,
)
@pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:transformers")
def test_python_of_a_page_runs(path, pages):
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name], reason=f"the extra for {path.name} is not installed")
    pages.run_python_of(path)


def test_python_of_the_readme_runs_as_printed_from_imports_to_output(tmp_path, monkeypatch, capsys, pages):
    """Without a warning, and what it prints is what the page shows, up to what another processor rounds otherwise."""
    readme = CHECKOUT / "README.md"
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="decomposable")
        namespace = pages.run_python_of(readme)
    shown = re.search(r"^```text\n(.*?)^```$", readme.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)[1]
    printed = capsys.readouterr().out
    number = r"[\d.]+(?=%)"
    assert re.sub(number, "", printed) == re.sub(number, "", shown)
    for got, wanted in zip(re.findall(number, printed), re.findall(number, shown), strict=True):
        assert float(got) == pytest.approx(float(wanted), abs=2)
    net, images = namespace["net"], namespace["images"]
    assert not net.training
    assert torch.allclose(net(images[:1]), net(images)[:1], atol=1e-4)  # an image alone as one of many
    assert (torch.from_numpy(namespace["y"]).argmax(1) == net(images).argmax(1)).float().mean() > 0.99


WITH_COMMANDS = [path for path in PAGES if "```sh" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_of_a_page_are_understood(path, pages):
    parser = cli.parser()
    for program, *arguments in pages.commands_of(path):
        if program == "decomposable-edge":
            assert arguments[0] in ("sizes", "bench", "run")
            continue
        assert program == "decomposable"
        assert parser.parse_args(arguments).verb_name == arguments[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_commands_of_a_page_work(path, tmp_path, monkeypatch, capsys, pages):
    """One after the other in one folder."""
    monkeypatch.chdir(tmp_path)
    for _, *arguments in pages.commands_of(path):
        assert cli.main(arguments) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", [*ALL_PAGES, *READMES], ids=lambda path: f"{path.parent.name}/{path.name}")
def test_links_of_a_page_lead_somewhere(path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, section = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), f"{path.name} links to {target}"
        if section:
            assert section in sections(linked), f"{path.name} links to {target}"


def sections(path):
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
