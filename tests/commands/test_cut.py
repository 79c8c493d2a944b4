"""`decomposable cut`, called as users call it."""

import json
from functools import partialmethod

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import decomposable as dn
from decomposable.commands import main as cli
from decomposable.data import digits
from decomposable.data.base import FromDatasets
from decomposable.recipes import Task, small

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
QUICK = ["--images", "120", "--sizes", "1,0.5,0.25", "--set", "calibrated_sizes=0.5,0.25", "train_images=400"]


@pytest.fixture(scope="module")
def weights(made_once):
    """Those of a network that was trained plainly for a moment."""

    def fill(folder):
        folder.mkdir()
        settings = ["method=plain", "epochs=2", "train_images=400", "calibration_images=100", "calibrated_sizes=0.5"]
        out = folder / "run"
        assert cli.main(["train", "digits", "--out", str(out), "-q", "--set", *settings, "sizes=1"]) == 0
        net = dn.load(out / "network.safetensors")
        save_file({k: v.contiguous() for k, v in net.extract().state_dict().items()}, folder / "weights.safetensors")
        return True

    return made_once("cut-weights", fill)[0] / "weights.safetensors"


def test_weights_in_and_every_size_out(call, weights, tmp_path):
    out = tmp_path / "net.safetensors"
    code, text, err = call("cut", "digits", "--init", weights, "-o", out, *QUICK)
    assert code == 0, err
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["1", "0.5", "0.25"]
    assert "Nothing was trained: bases by loss, from 120 images without labels; 1,397 test images" in text
    assert (tmp_path / "net.png").read_bytes()[:4] == b"\x89PNG"
    steps = ["measuring (step 1 of 3)", "calibrating (step 2 of 3)", "measuring (step 3 of 3)", "writing the file"]
    assert [line for line in err.splitlines() if line in steps] == steps
    net = dn.load(out)
    assert net.selector.params_scores is not None
    cut = net.info["cut"]
    assert (cut["criterion"], cut["images"], cut["tuned"]) == ("loss", 120, False)
    judged = cut["judged"]
    assert (judged["kept"], judged["is_crossed"], judged["measured_with"]) == ("data", True, 120)
    assert all({*each} == {"size", "by_data", "by_weights"} for each in judged["sizes"])
    assert net.info["init"]["file"] == "weights.safetensors"
    code, text, _ = call("sizes", out, "--json")
    rows = json.loads(text)["sizes"]
    assert [row["size"] for row in rows[:3]] == [1.0, 0.5, 0.25]
    assert rows[0]["accuracy"] > 80
    code, text, _ = call("evaluate", out, "--sizes", "0.5", "--json")
    assert json.loads(text)["sizes"][0]["accuracy"] == rows[1]["accuracy"]


def test_criteria_and_forms(call, weights, tmp_path):
    scores = {}
    for way in ("output", "singular_value"):
        out = tmp_path / f"{way}.safetensors"
        assert call("cut", "digits", "--init", weights, "-o", out, "--criterion", way, *QUICK, "form=channel")[0] == 0
        scores[way] = dn.load(out).selector.scores
        assert {layer.form for layer in dn.load(out).artifact().skeleton.layers} == {"channel"}
    assert not np.allclose(scores["output"][0], scores["singular_value"][0])


def test_tuning_is_said_and_stored(call, weights, tmp_path, monkeypatch):
    shorter = partialmethod(dn.DecomposedNet.tune_, steps=2, sizes=[0.5])
    monkeypatch.setattr(dn.DecomposedNet, "tune_", shorter)
    out = tmp_path / "net.safetensors"
    code, text, _ = call("cut", "digits", "--init", weights, "-o", out, "--tune", "--json", *QUICK)
    assert code == 0
    assert json.loads(text)["cut"]["tuned"] is True
    assert dn.load(out).artifact().tuned is not None


def test_without_labels_it_is_the_agreement(call, weights, tmp_path):
    out = tmp_path / "net.safetensors"
    code, text, err = call("cut", "digits", "--init", weights, "-o", out, "--agreement", *QUICK)
    assert code == 0, err
    assert text.splitlines()[0].endswith("agreement")
    assert text.splitlines()[1].endswith("100.00%")
    assert "how often a size says what the full network says of 1,397 test images" in text
    info = dn.load(out).info
    assert "sizes" not in info
    assert info["agreement"][0]["accuracy"] == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--criterion", "energie"], "--criterion energie; allowed: loss, output, singular_value, energy, uniform"),
        (["--images", "1"], "--images 1; allowed: an int of at least 2"),
        (["--sizes", "2%,x"], "--sizes"),
        (["--figure", "a.svg"], "--figure a.svg: got the ending '.svg'; allowed: .png"),
        (["--figure", "nowhere/a.png"], "there is no folder nowhere"),
        (["--set", "formm=channel"], "no setting is called formm"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(call, weights, tmp_path, arguments, message):
    code, out, err = call("cut", "digits", "--init", weights, "-o", tmp_path / "net.safetensors", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.strip().count("\n") == 0
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_replaced(call, weights, tmp_path):
    out = tmp_path / "net.safetensors"
    figure = tmp_path / "net.png"
    figure.write_bytes(b"precious")
    code, _, err = call("cut", "digits", "--init", weights, "-o", out, *QUICK)
    assert (code, figure.read_bytes(), out.exists()) == (2, b"precious", False)
    assert "--force" in err


def test_weights_of_another_network_are_refused(call, tmp_path):
    save_file({"x": torch.zeros(3)}, tmp_path / "other.safetensors")
    init, out = tmp_path / "other.safetensors", tmp_path / "net.safetensors"
    code, _, err = call("cut", "digits", "--init", init, "-o", out, *QUICK)
    assert code == 1
    assert "other.safetensors" in err
    assert not out.exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "criterion=energy"], "--set criterion: it has no effect on a cut; allowed: --criterion"),
        (["--set", "method=plain"], "--set method: it has no effect on a cut; allowed: none: nothing is trained"),
        (["--images", "50", "--set", "calibration_images=50"], "--images and --set calibration_images: got both"),
    ],
)
def test_settings_without_effect_are_refused(call, weights, tmp_path, more, message):
    code, _, err = call("cut", "digits", "--init", weights, "-o", tmp_path / "net.safetensors", *more)
    assert code == 2
    assert message in err


def test_images_can_be_set_as_a_setting_and_are_counted_as_they_are_used(call, weights, tmp_path):
    """Whole batches of 125: a batch of a few images would have other statistics."""
    out = tmp_path / "net.safetensors"
    quick = ["sizes=1,0.5", "calibrated_sizes=0.5", "train_images=400"]
    code, text, _ = call("cut", "digits", "--init", weights, "-o", out, "--set", "calibration_images=200", *quick)
    assert code == 0
    assert "from 250 images without labels" in text
    assert "cut with the recipe digits" in call("sizes", out)[1]


class OnlyImages(torch.utils.data.Dataset):
    def __init__(self, images, labels=None):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index] if self.labels is None else (self.images[index], self.labels[index])


def unlabelled(settings=small.DIGITS):
    train, test = digits.load(train_images=200)
    return Task(
        build_model=dn.models.small_cnn,
        load_data=lambda: FromDatasets(
            classes=10,
            train=OnlyImages(train.tensors[0]),
            test=OnlyImages(test.tensors[0], -torch.ones(len(test)).long()),
        ),
    )


def test_images_without_labels_are_cut_by_and_judged_by_agreement(call, weights, tmp_path):
    recipe, out = f"{__name__}:unlabelled", tmp_path / "net.safetensors"
    quick = ["--images", "120", "--sizes", "1,0.5", "--set", "calibrated_sizes=0.5"]
    code, text, err = call("cut", recipe, "--init", weights, "-o", out, *quick)
    assert code == 0, err
    assert "agreement" in text
    assert "100.00%" in text.splitlines()[1]  # the full network with itself
    code, _, err = call("train", recipe, "--out", tmp_path / "run", "--set", "epochs=1")
    assert code == 1
    assert "the training images have no labels" in err
    assert not (tmp_path / "run").exists()


def test_a_size_that_cannot_be_is_refused(call, weights, tmp_path):
    out = tmp_path / "net.safetensors"
    code, text, err = call(
        "cut", "digits", "--init", weights, "-o", out, *QUICK[:2], "--sizes", "0.5,0.0001", *QUICK[4:]
    )
    assert code == 2
    assert "smallest" in err
    assert not text
    assert not out.exists()


def test_bases_by_the_weights_alone_are_not_said_to_be_by_images(call, weights, tmp_path):
    out = tmp_path / "net.safetensors"
    code, text, err = call("cut", "digits", "--init", weights, "-o", out, "--criterion", "singular_value", *QUICK)
    assert code == 0, err
    assert "bases by singular_value; statistics from 120 images without labels" in text
