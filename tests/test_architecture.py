"""docs/architecture.md draws the package as it is."""

import ast
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from decomposable.moved import MOVED

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "src" / "decomposable"
PAGE = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
MOST_FLAT = 14

FILE = r"`((?:\w+/)+\w+\.py)`"
STEPS = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
ADDITIONS = re.findall(r"^\*\*(A [a-z ]+)\*\*.*?(\d+) files(.*?)(?=^\*\*A |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_few_modules_lie_flat_at_the_top():
    flat = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert len(flat) <= MOST_FLAT, flat


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_is_described_and_drawn(room):
    assert f"| `{room}/` |" in PAGE
    picture = ET.parse(CHECKOUT / "docs" / "architecture.svg")
    assert f"{room}/" in {element.text for element in picture.iter() if element.tag.endswith("text")}


def test_every_room_has_tests():
    assert set(ROOMS) <= {path.name for path in (CHECKOUT / "tests").iterdir()}


def test_every_file_that_it_names_exists():
    named = {path for path in re.findall(FILE, PAGE) if "NAME" not in path}
    assert len(named) > 20
    assert [path for path in sorted(named) if not (PACKAGE / path).is_file()] == []


def test_every_function_on_the_two_walks_is_where_it_says():
    assert len(STEPS) > 20
    for path, functions in STEPS:
        text = (PACKAGE / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", functions):
            *_, last = name.split(".")
            assert re.search(rf"^\s*(def|class) {last}\b", text, flags=re.MULTILINE), f"{path} has no {name}"


def imported_by(tree: ast.Module) -> set[str]:
    """Every name that a module imports at run time, in full, inside of its functions too."""
    for_checkers = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names = set()
    for node in set(ast.walk(tree)) - for_checkers:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are written in full"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


SHOWS_THE_PUBLIC_NAMES = "commands/demonstration.py"  # as users write it; the topmost room may import all others
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_inside_the_package_names_are_imported_from_where_they_live(module):
    """The public names and the old paths are found at run time, where the contract of the imports does not see them."""
    names = imported_by(ast.parse((PACKAGE / module).read_text(encoding="utf-8")))
    assert "decomposable" not in names or module == SHOWS_THE_PUBLIC_NAMES
    at_the_top = {name.split(".")[1] for name in names if name.startswith("decomposable.")}
    flat = {path.stem for path in PACKAGE.glob("*.py")}
    assert at_the_top <= {*ROOMS, *flat, "__version__"}
    assert [name for name in names for old in MOVED if f"{name}.".startswith(f"{old}.")] == []


@pytest.mark.parametrize(("what", "count", "text"), ADDITIONS, ids=[what for what, *_ in ADDITIONS])
def test_the_files_that_an_addition_touches_are_counted_right(what, count, text):
    assert len(ADDITIONS) == 6
    assert len(set(re.findall(FILE, text.partition("Your own:")[0]))) == int(count)
