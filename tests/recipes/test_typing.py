"""What a type checker says of code that uses the settings."""

import sys
from pathlib import Path
from subprocess import run

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
TYPED = """
from dataclasses import dataclass, replace
import decomposable as dn
from decomposable.training.methods.elastic import ElasticSettings

@dataclass(frozen=True, kw_only=True)
class Own(dn.recipes.Settings):
    hidden: int = 64

own = Own(hidden=3, epochs=2, of_methods=(ElasticSettings(elastic_start=0.3),))
settings = dn.recipes.Settings(epochs=3, of_methods=own.of_methods)
start: float | None = replace(settings, epochs=4).of(ElasticSettings).elastic_start
"""
WRONG = """settings.epoch
dn.recipes.Settings(epochs='3')
settings.epochs = 4
settings.of(ElasticSettings).elastic_begin
ElasticSettings(elastic_start="early")
"""


@pytest.mark.slow
def test_settings_are_known_to_a_type_checker_and_mistakes_are_found(tmp_path):
    pytest.importorskip("mypy")
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(TYPED, encoding="utf-8")
    wrong.write_text(TYPED + WRONG, encoding="utf-8")
    options = ["--config-file", str(CHECKOUT / "pyproject.toml"), "--no-incremental"]
    command = [sys.executable, "-m", "mypy", *options, str(right), str(wrong)]
    answer = run(command, cwd=CHECKOUT, capture_output=True, text=True, check=False).stdout
    lines = len(TYPED.splitlines())
    found = [line for line in answer.splitlines() if "error" in line and not line.startswith("Found")]
    assert [line.split(":")[1] for line in found] == [str(lines + i) for i in range(1, 6)], answer
    assert all(Path(line.split(":")[0]).name == "wrong.py" for line in found)
