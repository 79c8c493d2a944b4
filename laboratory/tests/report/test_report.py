"""The page: everything inside, nothing of a stranger's text as HTML, and one line for what cannot be shown."""

import json
import re
from itertools import pairwise

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable_edge.errors import DataError
from decomposable_lab.comparison.explorer import explored
from decomposable_lab.report.finding import find
from decomposable_lab.report.html import Html, tag
from decomposable_lab.report.page import page, styles
from decomposable_lab.report.verdicts import linked

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
    "command": "decomposable-lab compare --exhibit 2b",
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
        "figure 2(b), laptop scale · digits · seeds 0 and 1",
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


def content_of(text):
    return json.loads(re.search(r'id="content">(.*?)</script>', text, flags=re.S)[1])


def test_the_papers_claims_are_counted_without_ours(tmp_path):
    ours = {**EXHIBIT, "exhibit": "2c", "is_ours": True}
    text = page(find(written(tmp_path, one=EXHIBIT, two={**EXHIBIT, "exhibit": "beyond"}, three=ours)), "x")
    for name, count in (("The paper&#x27;s claims", 1), ("This project&#x27;s own goals", 2)):
        counts = re.search(rf'<ul aria-label="{name}">(.*?)</ul>', text)[1]
        assert re.findall(r"<b [^>]*>(\d+)</b>", counts) == [str(count), "0", str(count), str(count)]
    failing = re.search(r'class="failing">(.*?)</details>', text, flags=re.S)[1]
    assert failing.index("Of the paper&#x27;s claims (1)") < failing.index("Of this project&#x27;s own goals (2)")


def test_exhibits_named_in_a_text_are_linked_and_nothing_else(tmp_path):
    ids = {"2a": "exhibit-2a", "proposition-1": "exhibit-proposition-1", "beyond": "exhibit-beyond"}
    for text, count in (
        ("better (beyond)", 1),
        ("see proposition-1, and (see 2a).", 2),
        ("beyond 2a", 0),
        ("(2ab) see 2ab, see proposition-10", 0),
    ):
        assert linked(text, ids).count("<a ") == count, text
    assert linked("<b> (2a)", ids) == '&lt;b&gt; (<a href="#exhibit-2a">2a</a>)'


def test_every_method_has_a_symbol_of_its_own():
    found = styles()
    assert len({style["symbol"] for style in found.values()}) == len(found)
    assert len({style["colour"] for style in found.values()}) == len(found)


def test_trainings_are_grouped_by_network_and_a_command_is_said_once(tmp_path):
    run = {"tries": 1, "minutes": 2.5, "commit": "abc", "cpu": "a CPU", "command": "decomposable-lab compare it"}
    runs = [{**run, "method": method, "seed": seed} for method in ("plain", "elastic") for seed in (0, 1)]
    group = {"title": "digits, 2 epochs", "seeds": [0, 1], "methods": ["plain"], "settings": {}, "runs": runs}
    other = {**group, "settings": {"balance": 0.3}, "runs": [{**run, "method": "decomposable", "seed": 0}]}
    text = page(find(written(tmp_path, one={**EXHIBIT, "trainings": [group, other, "no group"]})), "x")
    origin = re.search(r'class="from">(.*?)</details>', text, flags=re.S)[1]
    assert origin.count("<table") == 1
    assert origin.count("<tr") == 4
    assert origin.count("decomposable-lab compare it") == 1
    assert "decomposable (balance=0.3)" in origin
    assert "2.5, 2.5" in origin


def test_older_and_newer_files_have_their_sliders(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    one = explored(dn.decompose(model, torch.zeros(1, 8)).selector, [], "a network")
    old, new = {**EXHIBIT, "explorer": one}, {**EXHIBIT, "exhibit": "2c", "explorer": None, "explorers": [one, one]}
    text = page(find(written(tmp_path, one=old, two=new)), "x")
    assert re.findall(r'type="range"', text) == ['type="range"'] * 3
    assert re.findall(r'data-explorer="(\d)"', text) == ["0", "1", "2"]
    assert len(content_of(text)["explorers"]) == 3


def row(size, curve="", **more):
    costs = {"macs": int(1000 * size), "macs_fraction": size, "params": 10, "params_fraction": size}
    return {"size": size, **costs, "accuracy": 90.0 * size, "curve": curve, **more}


def run_page(folder, sizes, epochs):
    record = {"recipe": "digits", "settings": {"method": "plain"}, "sizes": sizes, "epochs": epochs, "seed": 0}
    (folder / "record.json").write_text(json.dumps(record))
    text = page(find(folder), "x")
    columns = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", text)
    return text, columns, content_of(text)["sections"][0]["figures"]


def test_a_run_without_its_network_has_what_its_record_says(tmp_path):
    curves = ("base_sp_sv", "base_ch_eng")
    sizes = [row(size, curve, ranks=[3, 64]) for curve in curves for size in (1.0, 0.5, 0.25)]
    text, columns, figures = run_page(tmp_path, sizes, [{"epoch": 1, "loss": 1.5, "accuracy": 90.0}])
    assert (columns[0], *columns[-2:]) == ("cut", "smallest rank", "largest rank")
    assert [figure["title"] for figure in figures] == ["Test accuracy over size"]  # no curves of one point
    assert [one["name"] for one in figures[0]["series"]] == [
        "spatial form, by singular value",
        "channel form, by energy",
    ]
    assert "loss of the full network 1.500, test accuracy 90.00%" in text


def test_a_run_on_text_has_its_perplexity(tmp_path):
    sizes = [row(1.0, perplexity=10.0), row(0.5, perplexity=40.0), row(0.2, perplexity=None), "nothing"]
    _, columns, figures = run_page(tmp_path, sizes, [])
    assert columns[-1] == "perplexity"
    assert "cut" not in columns
    assert [(figure["title"], figure["series"][0]["y"]) for figure in figures] == [("Perplexity over size", [10, 40])]
    assert figures[0]["y"]["is_log"]
