"""Elastic training is said in one place: `elastic/options.py`."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from decomposable.elastic import ElasticOptions
from decomposable.recipes.settings import Settings
from decomposable.training.methods.elastic import ElasticSettings

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCE = CHECKOUT / "src" / "decomposable"
OWN = {"smallest_share", "distill", "low_steps_per_full", "even"}  # what nothing else has a name for
CODE = [
    *(path for path in SOURCE.rglob("*.py") if "elastic" not in path.relative_to(SOURCE).as_posix()),
    *(CHECKOUT / "examples").glob("*.py"),
]
PAGES = [CHECKOUT / "README.md", *(CHECKOUT / "docs").glob("*.md")]


def names_given(code: str) -> set[str]:
    """Every name that is given a value as a keyword, or as an entry of a dict."""
    tree = ast.walk(ast.parse(code))
    given = set()
    for node in tree:
        if isinstance(node, ast.Call):
            given |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}
        elif isinstance(node, ast.Dict):
            given |= {key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return given


def test_no_other_code_has_numbers_of_elastic_training():
    assert {each.name for each in fields(ElasticOptions)} > OWN
    for path in CODE:
        given = names_given(path.read_text(encoding="utf-8"))
        assert not given & OWN, path
        assert not {name for name in given if name.startswith("elastic_")}, path


def test_no_page_has_an_elastic_training_of_its_own():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(r"^```python.*?\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            assert not names_given(block) & OWN, path


def test_a_second_one_would_be_found():
    assert names_given("dn.Elastic(model, options=ElasticOptions(distill=1.0))") & OWN
    assert names_given('JointTrainer(elastic={"low_steps_per_full": 1})') & OWN


def test_the_settings_of_the_command_are_the_options():
    for balance in (0.5, 0.25):
        assert ElasticSettings().options(balance) == ElasticOptions(balance=balance)
    assert Settings().balance == ElasticOptions().balance
    changed = ElasticSettings(elastic_turns=2, elastic_smallest=0.1, elastic_order="data").options(0.5)
    assert changed == ElasticOptions(low_steps_per_full=2, smallest_share=0.1, order="data")
