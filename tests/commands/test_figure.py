"""The figures of a training and of times: what is in sight, and what they say."""

from types import SimpleNamespace

import pytest

pytest.importorskip("matplotlib")

from decomposable.commands import figure, networks, train
from decomposable.training.evaluation import Row


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were made, in place of their pixels."""
    figures = []
    monkeypatch.setattr(figure, "as_png", lambda made: figures.append(made) or b"\x89PNG")
    return figures


def rows(*found, curve="", perplexity=None):
    """A row for each size and its accuracy; the MACs are a little below what was asked for."""
    return [
        Row(
            size=size,
            macs=100,
            params=10,
            macs_fraction=0.99 * size,
            params_fraction=size,
            ranks=None,
            accuracy=accuracy,
            curve=curve,
            perplexity=perplexity and perplexity / size,
        )
        for size, accuracy in found
    ]


def test_curves_fill_their_figure_and_none_is_dropped(drawn, tmp_path):
    curves = {f"way {i}": rows((1.0, 91 - i / 10), (0.5, 90 - i), (0.1, 80 - i)) for i in range(9)}
    said = networks.draw_sizes(tmp_path / "a.png", curves, title="t", message="m", again="")
    assert said == f"The figure is {tmp_path / 'a.png'}"
    (axes,) = drawn[0].axes
    assert [line.get_label() for line in axes.get_lines()] == list(curves)
    assert len({(line.get_color(), line.get_marker()) for line in axes.get_lines()}) == 9
    assert axes.get_ylim()[0] < 72
    assert 91 < axes.get_ylim()[1] < 93
    assert axes.get_ylabel() == "test accuracy (%)"
    assert list(axes.get_lines()[0].get_xdata()) == pytest.approx([0.99, 0.495, 0.099])


@pytest.mark.parametrize(("perplexity", "measured"), [(None, "test accuracy (%)"), (4.0, figure.AXES["perplexity"])])
def test_a_training_is_drawn_by_what_it_is_judged_by_and_in_words(drawn, tmp_path, perplexity, measured):
    (tmp_path / "record.json").write_text("{}")
    job = SimpleNamespace(
        folder=SimpleNamespace(path=tmp_path, record=tmp_path / "record.json"),
        settings=SimpleNamespace(method="elastic", epochs=1, seed=3),
        recipe="a-recipe",
        init=None,
    )
    train._draw(job, rows((1.0, 50.0), (0.5, 40.0), perplexity=perplexity))
    (axes,) = drawn[0].axes
    (line,) = axes.get_lines()
    assert (line.get_label(), axes.get_ylabel()) == ("Elastic", measured)
    assert list(line.get_ydata()) == ([4.0, 8.0] if perplexity else [50.0, 40.0])
    assert [text.get_text() for text in axes.texts] == [
        "Elastic: 1 epoch from scratch, seed 3; no size is retrained",
        "8.00" if perplexity else "40.0%",
    ]
    assert axes.get_title(loc="left") == f"a-recipe: {'perplexity' if perplexity else 'accuracy'} over size"


def test_an_accuracy_of_100_percent_is_in_sight(drawn):
    perfect = figure.Curve(label="a", sizes=[1.0, 0.5], accuracies=[100.0, 100.0])
    figure.draw_curves([perfect], title="", message="", caption="")
    assert 100 < drawn[0].axes[0].get_ylim()[1] < 100.1


def test_times_say_what_their_band_is(drawn):
    figure.draw_times({"PyTorch": [(1.0, 8, 7, 9), (0.5, 5, 4, 6)]}, title="t", message="m")
    said = drawn[0].axes[0].get_legend().get_title().get_text()
    assert said == "line: median of the passes\nband: their middle half"
