import pickle
from pathlib import Path

import pytest

from decomposable.training.divergence import DivergedError
from decomposable_edge.errors import BudgetError, DataError, MissingExtraError, SettingError, how_to_install

CHECKOUT = Path(__file__).resolve().parents[1]
READ = (".py", ".md", ".toml", ".txt", ".cff", "")


def test_a_missing_package_says_what_works_from_a_checkout():
    error = MissingExtraError.of("Pillow", "images")
    assert str(error) == (
        "Pillow is not installed; run in a checkout of decomposable: pip install -c constraints.txt -e '.[images]'"
    )
    assert isinstance(error, ImportError)


def test_a_refused_setting_says_what_came_and_what_is_allowed_also_in_another_process():
    error = SettingError("epochs", "0", "an int of at least 1")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "epochs=0; allowed: an int of at least 1"
    assert (again.name, again.value, again.allowed) == ("epochs", "0", "an int of at least 1")


def test_what_an_error_says_to_programs_reaches_another_process(tmp_path):
    errors = (
        BudgetError.about("macs", 0.01, "0.1", why="too small", layer="a"),
        DataError.of(tmp_path, "it is empty"),
        DivergedError.at(3, "the loss is nan", tmp_path),
    )
    for error in errors:
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), vars(again)) == (str(error), vars(error))
    assert str(errors[0]) == "layer 'a': macs: too small; allowed: 0.1"
    assert (errors[0].came, errors[0].layer) == (0.01, "a")
    assert (errors[1].path, errors[1].reason) == (tmp_path, "it is empty")
    assert (errors[2].step, errors[2].checkpoint) == (3, tmp_path)


def test_nothing_tells_people_to_install_from_an_index_that_has_it_not():
    places = [CHECKOUT, *(CHECKOUT / name for name in ("src", "docs", "edge", "examples", "benchmarks", "results"))]
    files = [p for place in places for p in (place.glob("*") if place == CHECKOUT else place.rglob("*"))]
    texts = {p: p.read_text(encoding="utf-8") for p in files if p.is_file() and p.suffix in READ}
    assert len(texts) > 100
    for way in ("pip install decomposable", "pip install 'decomposable", 'pip install "decomposable'):
        assert [p for p, text in texts.items() if way in text] == []


def test_how_to_install_is_said_in_one_place_of_the_code_and_one_of_the_docs():
    command = how_to_install("EXTRA").rpartition(": ")[2].partition("[EXTRA]")[0]  # "pip install -c constraints.txt '."
    said = [
        p for folder in ("src", "docs", "edge") for p in (CHECKOUT / folder).rglob("*") if p.suffix in (".py", ".md")
    ]
    assert [p.name for p in said if command in p.read_text(encoding="utf-8")] == ["errors.py", "index.md"]


@pytest.mark.parametrize("page", ["deploy.md", "data.md", "recipes.md"])
def test_pages_that_need_an_extra_lead_there(page):
    assert "(index.md#installing)" in (CHECKOUT / "docs" / page).read_text(encoding="utf-8")
    assert "\n## Installing\n" in (CHECKOUT / "docs" / "index.md").read_text(encoding="utf-8")
