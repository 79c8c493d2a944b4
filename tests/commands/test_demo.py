import json
import math

import pytest
import torch

from decomposable import models
from decomposable.commands import demo, demonstration
from decomposable.commands import main as cli
from decomposable.data import digits
from decomposable.elastic import Elastic
from decomposable_edge.errors import InvalidArgumentError, how_to_install

QUICK = demonstration.Settings(
    seed=3, runs=2, train_images=200, widths=(16, 24, 24), epochs=20, batch_size=50, curve_sizes=(0.2,)
)


@pytest.fixture(scope="module")
def told():
    return []


@pytest.fixture(scope="module")
def record(told):
    """The demonstration itself, only smaller."""
    return demonstration.run(QUICK, told.append)


def test_the_digits_are_split_without_overlap_and_every_class_alike():
    data = digits.load(train_images=300, seed=1)
    assert (len(data.train), len(data.test)) == (300, 1497)
    images, labels = (torch.cat(pair) for pair in zip(data.train.tensors, data.test.tensors, strict=True))
    again = digits.load(train_images=300, seed=2)
    others, _ = (torch.cat(pair) for pair in zip(again.train.tensors, again.test.tensors, strict=True))
    assert images.shape == (1797, 1, 8, 8)
    assert not torch.equal(images, others)
    assert len(labels.unique()) == 10
    assert 29 <= data.train.tensors[1].bincount().min() <= data.train.tensors[1].bincount().max() <= 31
    torch.testing.assert_close(data.train.tensors[0].mean(), torch.tensor(0.0), atol=1e-5, rtol=0)
    unsplit = {image.numpy().tobytes() for image in data.train.tensors[0]}
    assert not unsplit & {image.numpy().tobytes() for image in data.test.tensors[0]}


def test_no_split_leaves_a_part_without_images():
    with pytest.raises(InvalidArgumentError, match="train_images=1797"):
        digits.load(train_images=1797)


def test_the_table_has_all_sizes_and_all_networks_within_the_budget(record):
    assert [row["size"] for row in record["table"]] == [1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1]
    full = record["table"][0]["joint"]
    for row in record["table"]:
        for method in demonstration.METHODS:
            assert row[method]["macs"] <= row["size"] * full["macs"]
            assert 0 <= row[method]["accuracy"] <= 100
    params = [row["joint"]["params"] for row in record["table"]]
    assert params == sorted(params, reverse=True)


def test_all_networks_learn_and_are_the_mean_of_the_runs(record):
    full, smallest = record["table"][0], record["table"][-1]
    for method in demonstration.METHODS:
        assert full[method]["accuracy"] > 80
        runs = [next(r for r in run[method]["rows"] if r["size"] == 0.1) for run in record["runs"]]
        assert math.isclose(smallest[method]["accuracy"], sum(r["accuracy"] for r in runs) / 2)
    assert full["joint"]["accuracy"] > smallest["joint"]["accuracy"]


def test_progress_is_told(told, record):
    assert told[0].startswith("run 1/2, elastic: training: 1 of 20 epochs, loss ")
    assert any(text.startswith("run 2/2, plain: training: 20 of 20 epochs") for text in told)


def test_all_trainings_see_the_same_batches(monkeypatch):
    seen = []

    def note(model, joint, x, y):
        seen.append((joint, y))
        return 0.0

    monkeypatch.setattr(demonstration, "add_gradient", note)
    data = digits.load(train_images=100)
    settings = demonstration.Settings(train_images=100, epochs=2)
    for method in demonstration.METHODS:
        demonstration.train(
            models.small_cnn((4,)), data.train, settings, seed=5, method=method, report=lambda text: None
        )
    assert [joint is not None for joint, _ in seen] == [True] * 8 + [False] * 4
    assert [isinstance(joint, Elastic) for joint, _ in seen[:8]] == [True] * 4 + [False] * 4
    for others in (seen[4:8], seen[8:]):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(seen[:4], others, strict=True))
    assert not torch.equal(seen[0][1], seen[2][1])


def test_the_text_says_what_was_run(record):
    text = demo.as_text(record)
    assert "trained on 200 images" in text
    assert "tested on 1,597 others" in text
    assert "Mean of 2 runs (seeds 3, 4," in text
    rows = text.split("\n")[-7:]
    assert [row.split()[0] for row in rows] == ["1.00", "0.75", "0.50", "0.35", "0.25", "0.15", "0.10"]
    assert len({len(row) for row in rows}) == 1


def test_one_run_is_not_called_a_mean(record):
    single = {**record, "runs": record["runs"][:1]}
    text = demo.as_text(single)
    assert "Mean" not in text
    assert "One run (seed 3)" in text


def test_record_and_figure_are_saved(record, tmp_path):
    figure, data = demo.save(record, tmp_path / "new" / "folder")
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    stored = json.loads(data.read_text())
    assert stored["settings"]["seed"] == 3
    assert stored["settings"]["ratio"] == [0.01, 0.5]
    assert stored["versions"]["torch"] == torch.__version__
    assert stored["seconds"] > 0
    assert len(stored["table"]) == 7
    assert sorted(path.name for path in figure.parent.iterdir()) == ["curve.png", "record.json"]


@pytest.mark.parametrize(("missing", "package"), [("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")])
def test_a_missing_package_is_named_with_the_command_that_installs_it(missing, package, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == missing else object())
    assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert err == f"decomposable demo: error: {package} is not installed; run {how_to_install('demo')}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_and_saves(as_json, record, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(demonstration, "run", lambda settings, report: record)
    arguments = ["demo", "--out", str(tmp_path), "--seed", "3", *(["--json"] if as_json else [])]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    stored = json.loads((tmp_path / "record.json").read_text())
    assert stored["command"].startswith("decomposable demo --out ")
    assert (tmp_path / "curve.png").exists()
    if as_json:
        assert json.loads(out) == stored
    else:
        assert out.startswith(demo.as_text(record))
        assert "record.json" in out


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"runs": 0}, {"epochs": 0}, {"batch_size": 301}])
def test_settings_are_checked_where_they_are_made(wrong):
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        demonstration.Settings(**wrong)
