"""The laboratory keeps to the modules that docs/architecture.md lists for extensions."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import decomposable
import decomposable_lab

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = Path(decomposable_lab.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
OURS = ("decomposable", "decomposable_edge")


def listed():
    """The modules of the table; one that begins with a dot is beside the one before it."""
    page = (CHECKOUT / "docs" / "architecture.md").read_text(encoding="utf-8")
    found = set()
    for row in re.findall(r"^\| (`decomposable.*?) \|", page[page.index("## For extensions") :], flags=re.MULTILINE):
        base = ""
        for name in re.findall(r"`([\w.]+)`", row):
            full = f"{base}{name}" if name.startswith(".") else name
            is_parent = name.startswith(".") or " with " not in row
            base = full.rpartition(".")[0] if is_parent else full
            found.add(full)
    return found


LISTED = listed()


def is_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


def imported(path):
    """Every module of ours that a file imports, and the names that it takes from it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] in OURS)
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in OURS:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full, "") if is_module(full) else (node.module, alias.name)


def test_every_module_of_the_list_exists_and_is_used():
    assert [name for name in sorted(LISTED) if not is_module(name)] == []
    used = {module for path in MODULES for module, _ in imported(PACKAGE / path)}
    assert LISTED - used <= {"decomposable"}


@pytest.mark.parametrize("path", MODULES)
def test_it_imports_listed_modules_and_public_names_only(path):
    for module, name in imported(PACKAGE / path):
        assert module in LISTED, f"{module} is not listed for extensions in docs/architecture.md"
        assert not name.startswith("_")


def test_its_version_is_that_of_the_library():
    text = (CHECKOUT / "laboratory" / "pyproject.toml").read_text(encoding="utf-8")
    assert f'version = "{decomposable.__version__}"' in text


def test_the_security_page_has_its_number():
    from decomposable_lab.methods.loading import MOST_COMPUTED

    text = " ".join((CHECKOUT / "SECURITY.md").read_text(encoding="utf-8").split())
    assert f"at most {MOST_COMPUTED:,} numbers" in text
