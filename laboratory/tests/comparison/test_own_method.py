"""A method that is none of the package's: registering it is enough to compare and draw it."""

import json
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

import decomposable_lab as lab
from decomposable.recipes.values import MethodSettings
from decomposable.training import methods
from decomposable.training.methods import METHODS, Method
from decomposable.training.methods.decomposing import decomposed
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.commands.main import main
from decomposable_lab.methods.base import LineStyle

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
QUICK = {"epochs": 2, "train_images": 200, "calibration_images": 100, "sizes": (1.0, 0.5)}
QUICK_TEXT = ["epochs=2", "train_images=200", "calibration_images=100", "sizes=1,0.5"]


@dataclass(frozen=True, kw_only=True)
class ToySettings(MethodSettings):
    toy_share: float = 0.5  # of the gradient that is used
    toy_shares: tuple[float, ...] = (0.5, 1.0)

    swept: ClassVar = {"toy_share": "toy_shares"}
    checks: ClassVar = ((("toy_share",), "a part in (0, 1]", lambda v: 0 < v <= 1),)


class ToyStep:
    """A part of the gradient, and a count of the steps that a resumed run goes on with."""

    def __init__(self, network, share):
        self.network, self.share, self.steps = network, share, 0

    def backward(self, closure):
        loss = closure(self.network)
        (self.share * loss).backward()
        self.steps += 1
        return {"loss": loss.detach(), "toy_steps": float(self.steps)}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


class Toy(Method):
    name = "toy"
    summary = "a part of the gradient"
    label = "a toy of ours"
    style = LineStyle(color="#123456", marker="H", linestyle="--")
    settings = ToySettings

    def step(self, network, settings):
        return ToyStep(network, settings.of(ToySettings).toy_share)

    def sized(self, network, material, settings):
        return decomposed(network, material, settings)


class Bare(Method):
    name = "bare"
    summary = "says nothing of itself"

    def sized(self, network, material, settings):
        return decomposed(network, material, settings)


@pytest.fixture
def toy():
    before = dict(METHODS)
    methods.register(Toy())
    methods.register(Bare())
    yield
    METHODS.clear()
    METHODS.update(before)


def test_it_is_compared_and_in_the_figure(toy, tmp_path):
    pytest.importorskip("matplotlib")
    from decomposable.commands.figure import OTHER_COLOURS
    from decomposable_lab.comparison.figure import figure_of

    options = ["--methods", "plain,toy,bare", "--seeds", "0", "--out", str(tmp_path), "--jobs", "1", "-q"]
    assert main(["compare", "digits", *options, "--set", *QUICK_TEXT]) == 0
    assert (tmp_path / "comparison.png").exists()
    content = json.loads((tmp_path / "comparison.json").read_text())
    assert list(content["methods"]) == ["plain", "toy", "bare"]
    axes = figure_of(content).axes[0]
    lines = {line.get_label().splitlines()[0]: line for line in axes.get_lines()}
    assert (lines["a toy of ours"].get_color(), lines["a toy of ours"].get_marker()) == ("#123456", "H")
    assert lines["bare"].get_color() == OTHER_COLOURS[0]
    assert list(lines["bare"].get_ydata()) == [p["accuracy"] for p in content["methods"]["bare"]["shown"]["points"]]
    legend = [text.get_text().splitlines()[0] for text in figure_of(content).legends[0].get_texts()]
    assert legend == ["normal learning, decomposed", "a toy of ours", "bare"]
    with pytest.raises(InvalidArgumentError, match=r"toy_share=0\.3: a comparison sets it itself; allowed: toy_shares"):
        lab.compare("digits", out=tmp_path / "other", methods=["toy"], toy_share=0.3)


MODULE = """
from decomposable.training import methods
from decomposable.training.methods.decomposing import decomposed

class Guest(methods.Method):
    name = "guest"
    summary = "of another module"

    def sized(self, network, material, settings):
        return decomposed(network, material, settings)
"""


@pytest.mark.slow
def test_it_is_known_to_processes_that_train_side_by_side(tmp_path, monkeypatch):
    (tmp_path / "guest_of_a_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import guest_of_a_test

    monkeypatch.setitem(METHODS, "guest", guest_of_a_test.Guest())
    content = lab.compare(
        "digits", out=tmp_path / "runs", methods=["guest"], seeds=(0, 1), jobs=2, device="cpu", **QUICK
    )
    assert content["methods"]["guest"]["shown"]["points"][0]["seeds"] == 2
    del sys.modules["guest_of_a_test"]
