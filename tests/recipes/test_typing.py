"""What a type checker says of code that uses the settings."""

import sys
from pathlib import Path
from subprocess import run

import pytest

from decomposable.training.methods.registry import BUILT_IN, own_defaults

CHECKOUT = Path(__file__).resolve().parents[2]
TYPED = """
from dataclasses import dataclass, replace
import decomposable as dn

@dataclass(frozen=True, kw_only=True)
class Own(dn.Settings):
    hidden: int = 64

own = Own(hidden=3, epochs=2, trp_energy=0.99)
settings = dn.Settings(epochs=3, trp_energy=0.99)
energy: float = replace(settings, widths=(1.0, 0.5)).trp_energy
"""
WRONG = "settings.epoch\ndn.Settings(epochs='3')\nsettings.epochs = 4\n"


@pytest.mark.slow
def test_settings_of_methods_are_known_to_a_type_checker_and_mistakes_are_found(tmp_path):
    pytest.importorskip("mypy")
    names = "".join(f"settings.{name}\n" for name in own_defaults(BUILT_IN))
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(TYPED + names, encoding="utf-8")
    wrong.write_text(TYPED + WRONG, encoding="utf-8")
    options = ["--config-file", str(CHECKOUT / "pyproject.toml"), "--no-incremental"]
    command = [sys.executable, "-m", "mypy", *options, str(right), str(wrong)]
    answer = run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False).stdout
    lines = len(TYPED.splitlines())
    found = [line for line in answer.splitlines() if "error" in line and not line.startswith("Found")]
    assert [line.split(":")[1] for line in found] == [str(lines + i) for i in (1, 2, 3)], answer
    assert all(Path(line.split(":")[0]).name == "wrong.py" for line in found)
