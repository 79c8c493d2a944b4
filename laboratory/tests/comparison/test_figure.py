"""The figures of a comparison, of a training and of times: what is in sight, and what they say."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from decomposable import recipes
from decomposable_lab.comparison import captions, figure

RESULTS = Path(__file__).parents[3] / "results" / "paper-laptop"


def content_in(folder):
    return json.loads((folder / "comparison.json").read_text())


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("fashion-mnist", "A small CNN on Fashion-MNIST, 8 epochs"),
        ("cifar10-resnet20", "ResNet-20 on CIFAR-10, 2 epochs"),
    ],
)
def test_a_comparison_says_what_was_trained_and_magnifies_where_the_best_are(name, title):
    content = content_in(RESULTS / name)
    made = figure.figure_of(content, title=captions.title_of(content, RESULTS / name))
    whole, near = made.axes
    assert whole.get_title(loc="left") == f"{title}: accuracy over size"
    elastic = [p for p in content["methods"]["elastic"]["shown"]["points"] if p["macs_fraction"] > 0.19]
    bottom, top = near.get_ylim()
    assert all(bottom < p["accuracy"] < top for p in elastic)
    assert top - bottom < 0.5 * (whole.get_ylim()[1] - whole.get_ylim()[0])
    assert top > max(p["highest"] for m in content["methods"].values() for p in m["shown"]["points"])
    assert {"0.25", "0.5", "1"} <= {tick.get_text() for tick in near.get_xticklabels()}


def test_every_line_of_a_comparison_is_in_the_legend_and_the_hero_is_the_boldest():
    content = content_in(RESULTS / "fashion-mnist")
    made = figure.figure_of(content)
    texts = made.legends[0].get_texts()
    for panel in made.axes:
        lines = [line for line in panel.get_lines() if not line.get_label().startswith("_")]
        assert [line.get_label() for line in lines] == [text.get_text() for text in texts]
        assert len(lines) == len(content["methods"])
        thickest = max(lines, key=lambda line: line.get_linewidth())
        assert thickest.get_label().startswith("Elastic\n")
    assert [text.get_text() for text in texts if text.get_fontweight() == "bold"] == [texts[0].get_text()]


def test_what_the_marks_are_is_said():
    several, alone = content_in(RESULTS / "fashion-mnist"), content_in(RESULTS / "cifar10-resnet20")
    said = [text.get_text() for text in figure.figure_of(several).axes[0].texts]
    assert any("Mean of seeds 0 and 1; bands and bars are their range" in text for text in said)
    assert any("Single points: trained for that size alone" in text for text in said)
    assert captions.explained(alone["seeds"], []) == "Seed 0 alone, so without a range. One protocol for all methods."
    assert captions.explained([0, 1, 2], []).startswith("Mean of seeds 0, 1 and 2;")


def test_a_form_that_is_not_tuckers_is_not_called_so():
    methods = content_in(RESULTS / "fashion-mnist")["methods"]
    labels = {name: captions.method_label(name, method) for name, method in methods.items()}
    assert labels["tucker"] == "spatial form at VBMF's ranks, tuned\nthe best of 3 forms"
    assert labels["plain"] == "normal learning, decomposed\nat each size the best of 8 ways to cut"
    assert labels["us-net"] == "US-Net"
    own = {"shown": {"label": "fast"}, "curves": {"fast": [], "slow": []}}
    assert captions.method_label("mine", own) == "mine\nfast, the best of 2 curves"


def test_every_recipe_of_the_package_has_a_short_title():
    titles = {name: captions.title_of({"recipe": name}) for name in recipes.BUILT_IN}
    assert titles["cifar100-resnet34"] == "ResNet-34 on CIFAR-100"
    assert all(" on " in title and len(title) < 80 for title in titles.values())
    assert captions.title_of({"recipe": "no.such.module:recipe"}) == "no.such.module:recipe"


def test_epochs_are_told_only_where_the_records_agree(tmp_path):
    content = {"recipe": "cifar10-resnet20"}
    for seed, settings in enumerate([{"epochs": 1}, {}, None]):
        (tmp_path / "plain" / str(seed)).mkdir(parents=True)
        (tmp_path / "plain" / str(seed) / "record.json").write_text(json.dumps({"settings": settings}))
    assert captions.title_of(content, tmp_path) == "ResNet-20 on CIFAR-10, 1 epoch"
    (tmp_path / "plain" / "1" / "record.json").write_text(json.dumps({"settings": {"epochs": 2}}))
    assert captions.title_of(content, tmp_path) == "ResNet-20 on CIFAR-10"


def test_no_second_panel_where_nothing_is_hidden():
    content = content_in(RESULTS / "fashion-mnist")
    two = {name: content["methods"][name] for name in ("elastic", "plain")}
    assert len(figure.figure_of({**content, "methods": two}).axes) == 1
