import shutil
import subprocess
from pathlib import Path

import pytest

import decomposable
from decomposable.training import records


def git(folder, *arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of a package that has a module in another room."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    package = tmp_path / "src" / "decomposable"
    for path in ("training/records.py", "core/joint.py"):
        (package / path).parent.mkdir(parents=True)
        (package / path).write_text("")
    monkeypatch.setattr(records, "PACKAGE", package)
    monkeypatch.setattr(records, "THIS_FILE", package / "training" / "records.py")
    git(tmp_path, "init", "-q")
    return package


def test_the_package_is_all_of_it():
    assert [str(records.PACKAGE)] == [str(Path(folder).resolve()) for folder in decomposable.__path__]
    assert records.THIS_FILE == records.PACKAGE / "training" / "records.py"


def test_a_change_anywhere_in_the_package_is_told(checkout):
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "all")
    clean = records.commit()
    assert clean is not None
    assert clean.isalnum()
    (checkout.parent / "elsewhere.txt").write_text("no part of the package")
    assert records.commit() == clean
    (checkout / "core" / "joint.py").write_text("changed = True\n")
    assert records.commit() == f"{clean}+changes"


def test_a_copy_in_another_projects_checkout_has_no_commit(checkout):
    (checkout.parent / "theirs.py").write_text("")
    git(checkout, "add", "../theirs.py")
    git(checkout, "commit", "-q", "-m", "theirs")
    assert records.commit() is None
