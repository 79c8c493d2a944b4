"""docs/architecture.md draws the packages as they are."""

import ast
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import decomposable

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = CHECKOUT / "src" / "decomposable"
PACKAGES = (PACKAGE, CHECKOUT / "src" / "decomposable_edge", CHECKOUT / "laboratory" / "src" / "decomposable_lab")
PAGE = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST_NAMES = 14

FILE = r"`((?:\w+/)+\w+\.py)`"
STEPS = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
ADDITIONS = re.findall(r"^\*\*(A [a-z ]+)\*\*.*?(\d+) files?(.*?)(?=^\*\*A |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)


def rooms(package):
    """The folders of a package that are packages themselves."""
    return sorted(path.parent.name for path in package.glob("*/__init__.py"))


def place_of(path):
    """Where a file is that the page names: in the library, or in the package that it begins with."""
    return next((base / path for base in (PACKAGE, *(p.parent for p in PACKAGES)) if (base / path).is_file()), None)


def test_the_library_shows_about_a_dozen_names():
    names = [name for name in dir(decomposable) if not name.startswith("_")]
    assert names == sorted(decomposable.__all__)
    assert len(names) <= MOST_NAMES
    assert all(getattr(decomposable, name) is not None for name in names)
    assert sorted(path.name for path in PACKAGE.glob("*.py")) == ["__init__.py", "__main__.py"]


@pytest.mark.parametrize(
    "room",
    [(package, room) for package in PACKAGES for room in rooms(package)],
    ids=lambda room: f"{room[0].name}/{room[1]}",
)
def test_every_room_is_described_and_drawn(room):
    package, name = room
    part = PAGE[PAGE.index(f"**`{package.name}`**") :]
    assert f"| `{name}/` |" in part
    picture = ET.parse(CHECKOUT / "docs" / "architecture.svg")
    assert f"{name}/" in {element.text for element in picture.iter() if element.tag.endswith("text")}


def test_every_room_has_tests():
    library, device, laboratory = map(rooms, PACKAGES)
    in_order = {path.name for path in (CHECKOUT / "tests").iterdir()}
    assert {*library, "sizing", "edge"} <= in_order  # what is no sizing on a device is tested as a whole, in edge
    assert device == ["file", "sizing"]
    assert set(laboratory) <= {path.name for path in (CHECKOUT / "laboratory" / "tests").iterdir()}


def test_every_file_that_it_names_exists():
    named = {path for path in re.findall(FILE, PAGE) if "NAME" not in path}
    assert len(named) > 20
    assert [path for path in sorted(named) if place_of(path) is None] == []


def test_every_function_on_the_two_walks_is_where_it_says():
    assert len(STEPS) > 20
    for path, functions in STEPS:
        text = place_of(path).read_text(encoding="utf-8")
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
    """The public names are found at run time, where the contract of the imports does not see them."""
    names = imported_by(ast.parse((PACKAGE / module).read_text(encoding="utf-8")))
    assert "decomposable" not in names or module == SHOWS_THE_PUBLIC_NAMES
    at_the_top = {name.split(".")[1] for name in names if name.startswith("decomposable.")}
    assert at_the_top <= {*rooms(PACKAGE), "__version__"}
    assert not any(name.split(".")[0] == "decomposable_lab" for name in names)


@pytest.mark.parametrize(("what", "count", "text"), ADDITIONS, ids=[what for what, *_ in ADDITIONS])
def test_the_files_that_an_addition_touches_are_counted_right(what, count, text):
    assert len(ADDITIONS) == 6
    assert len(set(re.findall(FILE, text.partition("Your own:")[0]))) == int(count)
