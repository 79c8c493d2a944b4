"""The page: everything inside, nothing of a stranger's text as HTML, and one line for what cannot be shown."""

import json
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.comparison.explorer import explored
from decomposable.comparison.report.finding import find
from decomposable.comparison.report.html import Html, tag
from decomposable.comparison.report.page import page
from decomposable.errors import DataError

HOSTILE = '</script><script>alert(1)</script><b title="\'">'
EXHIBIT = {
    "exhibit": "2b",
    "title": f"A title {HOSTILE}",
    "where": "figure 2(b)",
    "scale": "laptop",
    "figures": [
        {
            "title": "Curves",
            "x": {"label": "MACs", "is_log": True},
            "y": {"label": "accuracy"},
            "series": [{"name": HOSTILE, "x": [1, 0.5], "y": [90.0, None], "low": [], "high": [], "method": "elastic"}],
        }
    ],
    "tables": [{"title": "Numbers", "columns": ["a", "b"], "rows": [["1", HOSTILE]], "note": "a note"}],
    "claims": [
        {"text": "It holds.", "verdict": "holds", "seen": "+1.0", "on": "a small CNN"},
        {"text": "It does not.", "verdict": "fails", "seen": HOSTILE, "on": HOSTILE},
        {"text": "Who knows.", "verdict": HOSTILE, "seen": ""},
    ],
    "command": "decomposable compare --exhibit 2b",
    "commit": "abc1234",
    "machine": {"cpu": "a CPU", "cores": 2, "torch": "2.13"},
    "trainings": [{"title": "digits", "methods": ["plain"], "seeds": [0, 1]}],
}


def written(folder, **exhibits):
    (folder / "paper" / "exhibits").mkdir(parents=True)
    for name, content in exhibits.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / "paper" / "exhibits" / f"{name}.json").write_text(text)
    return folder


def without_library(text):
    """The page without plotly's own script."""
    scripts = re.findall(r"<script.*?</script>", text, flags=re.S)
    return text.replace(max(scripts, key=len), "")


def test_all_that_is_measured_is_on_the_page_and_nothing_is_loaded(tmp_path):
    found = find(written(tmp_path, one=EXHIBIT))
    text = page(found, "Results & more")
    rest = without_library(text)
    assert "Results &amp; more" in rest
    for shown in (
        "A title",
        "figure 2(b), laptop scale",
        "It holds.",
        "a small CNN",
        "does not hold",
        "Numbers",
        "a note",
        "abc1234",
        "a CPU",
    ):
        assert shown in rest, shown
    assert not re.findall(r"""(?:src|href|action|data|poster)=["'](?!#|data:)""", rest)
    assert "@import" not in rest
    assert "http" not in rest


def test_text_of_records_is_never_html(tmp_path):
    text = without_library(page(find(written(tmp_path, one=EXHIBIT)), HOSTILE))
    assert "alert(1)</script>" not in text
    assert "<script>alert" not in text
    content = json.loads(re.search(r'id="content">(.*?)</script>', text, flags=re.S)[1])
    assert content["sections"][0]["figures"][0]["series"][0]["name"] == HOSTILE
    assert text.count("<script") == 2  # the content and ours, besides the library


def test_elements_escape_what_is_inside():
    assert tag("p", "<b>", Html("<i></i>"), class_="a b") == '<p class="a b">&lt;b&gt;<i></i></p>'


def test_exhibits_come_in_the_order_of_the_paper_and_others_are_named(tmp_path):
    folder = written(
        tmp_path,
        z={**EXHIBIT, "exhibit": "2a"},
        a={**EXHIBIT, "exhibit": "3a"},
        b={**EXHIBIT, "exhibit": "beyond"},
        broken="{",
        list="[1]",
        other={"title": "x"},
        deep="[" * 100_000,
    )
    found = find(folder)
    assert [each["exhibit"] for each in found.exhibits] == ["beyond", "2a", "3a"]
    assert len(found.left_out) == 4
    assert "broken.json" in page(found, "x")


def test_folders_with_nothing_to_show_are_refused(tmp_path, call):
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "record.json").write_text("{}")
    for folder, message in (
        ("none", "no such folder"),
        ("file", "a file"),
        ("run", "not the record of a run"),
        (".", "no exhibit"),
    ):
        with pytest.raises(DataError, match=message):
            find(tmp_path / folder)
    code, _, error = call("report", tmp_path / "none", "-o", tmp_path / "page.html")
    assert (code, error.count("\n")) == (1, 1)
    assert call("report", tmp_path, "-o", tmp_path / "page.txt")[0] == 2
    assert not (tmp_path / "page.html").exists()


def test_the_slider_has_sizes_from_the_smallest_measured_to_the_full_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 10))
    net = dn.decompose(model, torch.zeros(1, 3, 8, 8))
    measured = [{"macs_fraction": size, "accuracy": 100 * size} for size in (0.2, 0.5, 1.0)]
    found = explored(net.selector, [*measured, {"macs_fraction": None, "accuracy": 1.0}], "a network")
    sizes = found["sizes"]
    assert sizes[0]["size"] <= 0.2
    assert sizes[-1]["size"] == 1.0
    assert sizes[-1]["ranks"] == found["full_ranks"]
    assert sizes[-1]["accuracy"] == 100.0
    assert all(a["macs"] < b["macs"] for a, b in pairwise(sizes))
    plan = net.resize_(macs=sizes[len(sizes) // 2]["macs"])
    assert list(plan.ranks.values()) == sizes[len(sizes) // 2]["ranks"]
    assert found["layers"] == ["0", "2", "4"]


def test_a_run_has_its_curves_its_sizes_and_a_slider(tmp_path, call):
    quick = {"epochs": 2, "train_images": 100, "calibration_images": 50, "sizes": (1.0, 0.5)}
    dn.train("digits", out=tmp_path / "run", **quick)
    code, out, _ = call("report", tmp_path / "run", "-o", tmp_path / "run.html", "--title", "My run")
    assert code == 0
    assert "1 runs" in out
    rest = without_library((tmp_path / "run.html").read_text())
    assert "My run" in rest
    assert 'type="range"' in rest
    content = json.loads(re.search(r'id="content">(.*?)</script>', rest, flags=re.S)[1])
    assert [figure["title"] for figure in content["sections"][0]["figures"]] == [
        "Loss by epoch",
        "Test accuracy by epoch",
    ]
    assert len(content["explorers"][0]["sizes"]) > 10
    assert call("report", tmp_path / "run", "-o", tmp_path / "run.html")[0] == 2  # it is there
    assert call("report", tmp_path / "run", "-o", tmp_path / "run.html", "--force", "--json")[0] == 0
