"""The verbs that train and use a network file, called as users call them; and everything that can be wrong."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import decomposable as dn
from decomposable import models, recipes
from decomposable.commands import main as cli
from decomposable.network import artifact
from decomposable.recipes import small
from decomposable.training.evaluation import accuracy
from decomposable_edge.console import as_table, parse_size, parse_sizes
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.sizing.plans import SizeRequest

# Few sizes are calibrated here, on purpose: what a size far from them does is looked at in test_grid.py.
pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
SETTINGS = ["epochs=2", "train_images=300", "calibration_images=100", "calibrated_sizes=0.3,0.5", "sizes=1,0.5,0.3,0.2"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "digits"
    assert cli.main(["train", "digits", "--out", str(out), "--set", *SETTINGS]) == 0
    return out


@pytest.fixture
def file(run, tmp_path):
    """A network file that may be spoilt."""
    return shutil.copy(run / "network.safetensors", tmp_path / "network.safetensors")


def build():
    return models.small_cnn()


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_sizes_lists_what_was_measured_and_the_smallest_possible(file, call):
    code, out, _ = call("sizes", file)
    assert code == 0
    rows = out.split("\n\n")[0].split("\n")
    assert rows[0].split() == ["size", "MACs", "of", "all", "parameters", "of", "all", "ranks", "test", "accuracy"]
    assert [row.split()[0] for row in rows[1:5]] == ["1", "0.5", "0.3", "0.2"]
    assert all(row.endswith("%") for row in rows[1:5])
    assert not rows[5].endswith("%")
    assert "1-1" in rows[5]
    assert len(rows) == 6
    assert "statistics of 2 calibrated sizes" in out
    assert "trained with digits" in out


def test_sizes_as_json_agrees_with_the_network(file, call):
    code, out, _ = call("sizes", file, "--json")
    assert code == 0
    net = dn.load(file, model=build())
    for row in json.loads(out)["sizes"][:-1]:
        plan = net.resize_(macs=row["size"])
        assert (row["macs"], row["params"]) == (plan.macs, plan.params)
        assert row["ranks"] == [min(plan.ranks.values()), max(plan.ranks.values())]


def with_accuracies(file, accuracies):
    net = dn.load(file, model=build())
    rows = [{"size": size, "accuracy": accuracy} for size, accuracy in accuracies.items()]
    net.save(file, info={**net.info, "sizes": rows})


@pytest.mark.parametrize(
    ("drop", "size"), [("0", "1"), ("0.5", "0.5"), ("1.0", "0.5"), ("1.1", "0.25"), ("5", "0.25"), ("100", "0.1")]
)
def test_the_smallest_size_within_a_drop(file, call, drop, size):
    with_accuracies(file, {1.0: 90.0, 0.5: 89.5, 0.35: 88.95, 0.25: 88.9, 0.1: 30.0})
    code, out, _ = call("sizes", file, "--accuracy-drop", drop)
    assert code == 0
    assert out.split("\n")[1].split()[0] == size
    assert out.count("\n") == 2


def test_a_drop_without_accuracies_is_measured_where_the_data_is_at_hand(file, call):
    net = dn.load(file, model=build())
    net.save(file, info={k: v for k, v in net.info.items() if k != "sizes"})
    code, out, _ = call("sizes", file, "--accuracy-drop", "3", "--json")
    assert code == 0
    [row] = json.loads(out)["sizes"]
    task = recipes.make_task(small.digits, None, small.DigitsSettings(train_images=300))
    net.resize_(macs=1.0)
    full = accuracy(net, task.load_data())
    net.resize_(macs=row["size"])
    assert accuracy(net, task.load_data()) == pytest.approx(row["accuracy"])
    assert row["accuracy"] >= full - 3
    net.save(file, info={"settings": {}})
    code, _, err = call("sizes", file, "--accuracy-drop", "3")
    assert code == 1
    assert "has no accuracies" in err


@pytest.mark.parametrize(
    ("accuracies", "drop", "expected"),
    [
        ({}, 1, 0.1),  # nothing is lost anywhere
        ({0.5: 80.0}, 1, 0.1),  # one bad size does not hide the good ones below it
        (dict.fromkeys((0.3, 0.25, 0.2, 0.15, 0.1), 50.0), 1, 0.325),
    ],
)
def test_the_search_looks_below_a_size_that_is_not_good(run, accuracies, drop, expected):
    from decomposable.commands.sizes import search
    from decomposable.training.evaluation import Row

    selector = artifact.read(run / "network.safetensors").selector

    def measure(size):
        lowest = max((s for s in accuracies if s != 0.5), default=0)
        points = accuracies.get(size, 90.0 if size > lowest + 0.01 else 50.0)
        return Row.of(size, selector.of_size(size), points)

    found = search(measure, selector.smallest_size, drop)
    assert found.accuracy == 90.0
    assert found.size <= expected


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error(file, tmp_path):
    program = f"import sys; from decomposable.commands.main import main; sys.exit(main(['sizes', {str(file)!r}]))"
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for environment in (buffered, {**buffered, "PYTHONUNBUFFERED": "1"}):
        with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as process:
            process.stdout.close()
            said = process.stderr.read()  # at most that few sizes are calibrated
            assert b"rror" not in said
            assert b"Traceback" not in said
        assert process.returncode == 1


@pytest.mark.slow
def test_a_recipe_of_ones_own_with_its_own_data_is_searched(run, call, tmp_path, monkeypatch):
    (tmp_path / "own_digits_recipe.py").write_text(
        "from decomposable.recipes import small\n"
        "def f(settings=small.DigitsSettings(train_images=300)):\n"
        "    return small.digits(settings)\n"
    )
    monkeypatch.chdir(tmp_path)
    file = run / "network.safetensors"
    code, out, err = call("sizes", file, "--accuracy-drop", "50", "--recipe", "own_digits_recipe:f", "--json")
    assert code == 0, err
    assert json.loads(out)["sizes"][0]["accuracy"] is not None
    code, _, err = call("sizes", file, "--accuracy-drop", "50", "--recipe", "cifar10-resnet20")
    assert code == 1
    assert "--data DIR is needed" in err


# --- evaluate ------------------------------------------------------------------------------------------------------


def test_evaluate_gives_the_accuracies_of_the_record(run, file, call):
    code, out, _ = call("evaluate", file, "--sizes", "1,50%,0.3", "--json")
    assert code == 0
    record = {row["size"]: row["accuracy"] for row in json.loads((run / "record.json").read_text())["sizes"]}
    rows = json.loads(out)["sizes"]
    assert [row["asked"] for row in rows] == ["1", "50%", "0.3"]
    assert [row["accuracy"] for row in rows] == pytest.approx([record[1], record[0.5], record[0.3]])


def test_evaluate_takes_any_budget(file, call):
    full = artifact.read(file).selector.full_cost("macs")
    code, out, _ = call("evaluate", file, "--sizes", f"0.123,{full // 2},0.5M")
    assert code == 0
    assert [line.split()[0] for line in out.split("\n")[1:4]] == ["0.123", str(full // 2), "0.5M"]
    code, out, _ = call("evaluate", file, "--params", "20%", "--json")
    assert code == 0
    assert json.loads(out)["sizes"][0]["params_fraction"] <= 0.2


def test_evaluate_without_sizes_takes_the_usual_ones_that_exist(file, call, tmp_path):
    smallest = artifact.read(file).selector.smallest_size
    code, out, _ = call("evaluate", file, "--json")
    assert code == 0
    sizes = [row["size"] for row in json.loads(out)["sizes"]]
    assert sizes == [size for size in (1, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1) if size >= smallest]


def test_only_a_built_in_recipe_is_taken_from_a_file(file, call, tmp_path, monkeypatch):
    (tmp_path / "hostile_module.py").write_text("open('owned', 'w')\ndef f(): pass\n")
    monkeypatch.chdir(tmp_path)
    net = dn.load(file, model=build())
    net.save(file, info={**net.info, "recipe": "hostile_module:f"})
    code, _, err = call("evaluate", file)
    assert code == 2
    assert "--recipe is needed" in err
    assert not (tmp_path / "owned").exists()
    assert call("evaluate", file, "--recipe", "digits", "--sizes", "0.5")[0] == 0


def test_evaluate_takes_align(file, call):
    selector = artifact.read(file).selector
    accuracies = {}
    for align in ("1", "4", "auto"):
        code, out, err = call("evaluate", file, "--sizes", "0.5,0.3", "--align", align, "--json")
        assert code == 0
        content = json.loads(out)
        rounded = align if align == "auto" else int(align)
        plans = [selector.plan_for(SizeRequest(macs=size, align=rounded)) for size in (0.5, 0.3)]
        assert [row["macs"] for row in content["sizes"]] == [plan.macs for plan in plans]
        assert content["align"] == rounded
        accuracies[align] = [row["accuracy"] for row in content["sizes"]]
        warned = "decomposable evaluate: warning: batch normalisation has statistics of ranks that were not rounded to"
        assert (warned in err) == (align == "4")
    code, out, _ = call("evaluate", file, "--sizes", "0.5,0.3", "--json")
    assert [row["accuracy"] for row in json.loads(out)["sizes"]] == accuracies["1"]
    code, out, _ = call("evaluate", file, "--sizes", "0.5", "--align", "8")
    assert "ranks rounded to multiples of 8" in out
    for wrong in ("0", "measured", "x"):
        code, _, err = call("evaluate", file, "--align", wrong)
        assert code == 2
        assert f"--align: {wrong}; allowed: an int of at least 1, such as 8, and at most 65536; or auto" in err


# --- calibrate -----------------------------------------------------------------------------------------------------


def test_calibrate_writes_statistics_into_a_file(file, call):
    """In place, at once or not at all; nothing else of the file changes."""
    before = artifact.read(file)
    code, out, err = call("calibrate", file, "--align", "8", "--sizes", "0.3,0.5")
    assert code == 0, err
    assert out.startswith("2 sizes calibrated, ranks rounded to multiples of 8: 100 images in 1 batch, ")
    assert f"{file}: written; it has statistics for 4 sizes" in out
    assert "ranks: rounded by auto or not at all, multiples of 8" in out
    after = artifact.read(file)
    assert after.statistics.alignments == (1, 8)
    assert {plan.ranks for plan in after.statistics.plans} == {
        after.selector.plan_for(SizeRequest(macs=macs, align=align)).ranks for macs in (0.3, 0.5) for align in (1, 8)
    }
    assert after.plan == before.plan
    assert all(torch.equal(after.state[key], value) for key, value in before.state.items())
    for name, (first, second) in before.factors.items():
        assert torch.equal(after.factors[name][0], first)
        assert torch.equal(after.factors[name][1], second)
    assert {**after.info, "sizes": None} == {**before.info, "sizes": None}
    assert list(file.parent.iterdir()) == [file]
    _, _, err = call("evaluate", file, "--sizes", "0.3,0.5", "--align", "8")
    assert "warning" not in err


def test_calibrate_takes_the_images_of_the_training(run, file, call, tmp_path):
    """As many, the same and augmented alike: the statistics are those that the training had made."""
    out_file = tmp_path / "again.safetensors"
    net = dn.load(file)
    stored = net.artifact().statistics
    net.forget_statistics_()
    net.save(file)
    code, out, _ = call("calibrate", file, "--sizes", "0.3,0.5", "-o", out_file, "--json")
    assert code == 0
    report = json.loads(out)
    assert (report["sizes"], report["batches"], report["images"], report["align"]) == (2, 1, 100, "auto")
    assert report["seconds"] > 0
    assert artifact.read(file).statistics is None
    again = artifact.read(out_file).statistics
    torch.testing.assert_close(again.mean_SC, stored.mean_SC)
    torch.testing.assert_close(again.var_SC, stored.var_SC)
    for more in (["--seed", "7"], ["--images", "300"]):
        assert call("calibrate", file, "--sizes", "0.3,0.5", "-o", out_file, "--force", *more)[0] == 0
        assert not torch.equal(artifact.read(out_file).statistics.mean_SC, stored.mean_SC)


def test_accuracies_of_other_statistics_do_not_stay_in_the_file(file, call):
    """Those of sizes that run exactly as they did stay; 0.5 is interpolated by nothing, 0.2 by what lies beside it."""
    measured = {row["size"] for row in artifact.read(file).info["sizes"]}
    assert measured == {1.0, 0.5, 0.3, 0.2}
    code, out, _ = call("calibrate", file, "--sizes", "0.2", "--images", "50")
    assert code == 0
    assert "accuracies left out, because they were measured with other statistics: 1;" in out
    assert f"decomposable evaluate {file}" in out
    assert {row["size"] for row in artifact.read(file).info["sizes"]} == {1.0, 0.5, 0.3}
    code, out, _ = call("calibrate", file, "--sizes", "0.5", "--images", "50", "--json")
    assert json.loads(out)["accuracies_dropped"] == 1
    assert {row["size"] for row in artifact.read(file).info["sizes"]} == {1.0, 0.3}


def test_calibrate_needs_code_and_data_as_evaluate_does(file, call, tmp_path):
    net = dn.load(file)
    net.save(file, info={})
    code, _, err = call("calibrate", file)
    assert code == 2
    assert "--recipe is needed: the file names none; allowed: digits" in err
    assert call("calibrate", file, "--recipe", "digits", "--sizes", "0.4", "--images", "50")[0] == 0
    assert len(dn.load(file).artifact().statistics.plans) == 3
    code, _, err = call("calibrate", file, "--recipe", "fashion-mnist")
    assert code != 0
    assert "--data" in err
    deep = dn.decompose(models.resnet20(num_classes=10), torch.zeros(1, 3, 32, 32))
    deep.save(tmp_path / "deep.safetensors")
    code, _, err = call("calibrate", tmp_path / "deep.safetensors", "--recipe", "digits", "--sizes", "0.5")
    assert code == 1
    assert "the network cannot run a batch of shape (125, 1, 8, 8)" in err
    assert dn.load(tmp_path / "deep.safetensors").artifact().statistics is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--align", "most"], ["--align: most; allowed: an int of at least 1"]),
        (["--align", "0"], ["--align: 0; allowed"]),
        (["--sizes", "0.0001"], ["macs=0.0001 is too small"]),
        (["--sizes", "x"], ["--sizes x: not a size"]),
        (["--images", "1"], ["--images 1; allowed: an int of at least 2"]),
        (["--seed", "-1"], ["--seed -1; allowed: an int from 0"]),
        (["-o", "FILE"], ["it exists; allowed: another name, or --force"]),
        (["-o", "other.onnx"], ["got the ending '.onnx'; allowed: .safetensors"]),
        (["-o", "nowhere/a.safetensors"], ["there is no folder nowhere"]),
        (["--data", "x"], ["--data x: this recipe brings its own data"]),
    ],
)
def test_what_calibrate_cannot_do_is_one_line_and_changes_nothing(file, call, arguments, words):
    before = contents(file.parent)
    code, out, err = call("calibrate", file, *(file if argument == "FILE" else argument for argument in arguments))
    assert (code, out) == (2, "")
    assert all(word in err for word in words), err
    assert err.count("\n") == 1
    assert contents(file.parent) == before


def test_a_network_without_batch_normalisation_is_not_calibrated(call, tmp_path):
    path = tmp_path / "plain.safetensors"
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    dn.decompose(model, torch.zeros(1, 1, 8, 8)).save(path)
    (tmp_path / "plain_recipe.py").write_text(_PLAIN_RECIPE)
    sys.path.insert(0, str(tmp_path))
    try:
        code, _, err = call("calibrate", path, "--recipe", "plain_recipe:plain")
    finally:
        sys.path.remove(str(tmp_path))
    assert code == 2
    assert "it has no batch normalisation" in err


_PLAIN_RECIPE = """
import torch
from decomposable.recipes import Task, small

def plain():
    build = lambda: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    return Task(build_model=build, load_data=small.digits().load_data)
"""


# --- resize --------------------------------------------------------------------------------------------------------


def test_resize_writes_a_plain_state_dict(file, call, tmp_path):
    code, out, _ = call("resize", file, "--macs", "0.25", "-o", tmp_path / "small.safetensors")
    assert code == 0
    assert "two factors" in out
    net = dn.load(file, model=build())
    plan = net.resize_(macs=0.25)
    expected = net.extract().state_dict()
    state = load_file(tmp_path / "small.safetensors")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert sum(v.numel() for n, v in state.items() if "running" not in n and "num_batches" not in n) == plan.params
    small_file = tmp_path / "small.safetensors"
    assert small_file.stat().st_size < 0.5 * (tmp_path / "network.safetensors").stat().st_size


@pytest.mark.parametrize("kind", ["state-dict", "artifact"])
def test_what_resize_wrote_is_loaded_and_trained_further(file, call, tmp_path, kind):
    out = tmp_path / "small.safetensors"
    assert call("resize", file, "--macs", "25%", "-o", out, "--as", kind)[0] == 0
    loaded = dn.load(out, model=build())
    module = loaded.extract() if kind == "artifact" else loaded
    net = dn.load(file, model=build())
    net.resize_(macs=0.25)
    x = torch.randn(8, 1, 8, 8)
    assert torch.allclose(module.eval()(x), net.eval()(x), atol=1e-5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    y = torch.randint(0, 10, (8,))
    losses = []
    module.train()
    for _ in range(5):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(module(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_an_artifact_of_one_size_goes_down_and_not_up(file, call, tmp_path):
    out = tmp_path / "small.safetensors"
    assert call("resize", file, "--macs", "0.3", "-o", out, "--as", "artifact")[0] == 0
    code, text, _ = call("sizes", out)
    assert code == 0
    assert [line.split()[0] for line in text.split("\n")[1:3]] == ["0.3", "0.2"]
    code, text, _ = call("evaluate", out, "--sizes", "1,0.2", "--json")
    rows = json.loads(text)["sizes"]
    assert rows[0]["macs_fraction"] <= 0.3
    assert rows[1]["macs_fraction"] <= 0.2
    code, text, _ = call("evaluate", file, "--sizes", "0.2", "--json")
    assert json.loads(text)["sizes"][0]["accuracy"] == pytest.approx(rows[1]["accuracy"])


def test_resize_replaces_a_file_only_when_told_to(file, call, tmp_path):
    out = tmp_path / "small.safetensors"
    out.write_bytes(b"precious")
    code, _, err = call("resize", file, "--macs", "0.25", "-o", out)
    assert (code, out.read_bytes()) == (2, b"precious")
    assert "--force" in err
    assert call("resize", file, "--macs", "0.25", "-o", out, "--force")[0] == 0
    assert out.stat().st_size > 100


def test_ratio_and_params_are_sizes_as_well(file, call, tmp_path):
    for i, option in enumerate((("--ratio", "0.2"), ("--params", "30%"), ("--params", "20K"))):
        code, out, _ = call("resize", file, *option, "-o", tmp_path / f"{i}.safetensors", "--json")
        assert code == 0
        assert json.loads(out)["bytes"] > 0
    assert json.loads(out)["params"] <= 20_000


# --- bad input -----------------------------------------------------------------------------------------------------

VERBS = {
    "sizes": lambda file, out: ("sizes", file),
    "evaluate": lambda file, out: ("evaluate", file),
    "resize": lambda file, out: ("resize", file, "--macs", "0.5", "-o", out),
}


def _truncate(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _flip(file):
    """In the header: what a verb does not read, it need not check."""
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    file.write_bytes(content)


SPOILT = {
    "absent": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "noise": lambda file: file.write_bytes(b"\x93nonsense" * 1000),
    "truncated": _truncate,
    "one bit flipped": _flip,
    "of something else": lambda file: save_file({"x": torch.zeros(3)}, file),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_network_file_is_one_clear_line(file, call, tmp_path, verb, how):
    SPOILT[how](file)
    before = contents(tmp_path)
    code, out, err = call(*VERBS[verb](file, tmp_path / "out.safetensors"))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith(f"decomposable {verb}: error: ")
    assert "network.safetensors" in err
    assert contents(tmp_path) == before


ODD = [
    None,
    True,
    -1,
    0.5,
    10**300,
    -(10**300),
    1e300,
    "x",
    "\x1b[2J",
    [],
    [[]],
    {},
    {"a": []},
    [10**300],
    ["\x1b]0;x\x07"],
]


def _noting(file, info):
    """The network file with other notes, and a checksum that is right."""
    contents = artifact.read(file)
    contents.save(file, info=info)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_odd_values_in_info_are_no_traceback(file, call, tmp_path, verb):
    """They are passed over, or one line says what is wrong with the file."""
    known = artifact.outline(file).info
    row, out_file = known["sizes"][0], tmp_path / "out.safetensors"
    changes = [{key: value} for key in ("recipe", "settings", "sizes") for value in ODD]
    changes += [{"sizes": [{**row, key: value}, value]} for key in ("size", "accuracy", "params") for value in ODD]
    changes += [{"settings": {key: value}} for key in ("epochs", "mean", "train_images", "form") for value in ODD]
    for change in changes[:: 3 if verb == "sizes" else 11]:
        info = {**known, **change}
        _noting(file, info)
        out_file.unlink(missing_ok=True)
        code, out, err = call(*VERBS[verb](file, out_file), *(["--sizes", "1"] if verb == "evaluate" else []))
        assert code in (0, 1, 2), info
        assert (code == 0) == bool(out), info
        assert err.count("error") == (code != 0), err
        assert "\x1b" not in out + err


def test_settings_in_a_file_that_cannot_be_are_the_files_fault(file, call):
    _noting(file, {**artifact.outline(file).info, "settings": {"epochs": 10**300}})
    code, out, err = call("evaluate", file)
    assert (code, out) == (1, "")
    assert "the file's settings cannot be: epochs=1000" in err
    assert err.count("\n") == 1


def test_a_huge_number_in_set_is_one_line_and_code_2(call, tmp_path):
    for text in ("epochs=1" + "0" * 400, "epochs=1" + "0" * 5000, "epochs=1e999", "learning_rate=1e999", "mean=1e999"):
        code, out, err = call("train", "digits", "--out", tmp_path / "run", "--set", text)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert len(err) < 500
    assert not (tmp_path / "run").exists()


EVIL = "\x1b]0;owned\x07\x1b[2J\n\u202eadresu"


def test_escape_sequences_out_of_a_file_are_shown_and_not_obeyed(call, tmp_path):
    """In the names of layers, in notes, in errors that quote them: everything goes through one function."""
    from torch import nn

    model = nn.Sequential()
    model.add_module(EVIL.replace(".", ""), nn.Linear(8, 8))
    model.add_module("last", nn.Linear(8, 2))
    path, out = tmp_path / "evil.safetensors", tmp_path / "out.safetensors"
    info = {"recipe": EVIL, "sizes": [{"size": 1, "accuracy": 50.0}], "resized": EVIL}
    dn.decompose(model, example_input=torch.zeros(1, 8)).save(path, info=info)
    shown = ""
    for arguments in (("sizes", path), ("evaluate", path), ("resize", path, "--macs", "0.9", "-o", out),
                      ("bench", path), ("export", path, "-o", tmp_path / "x.onnx")):  # fmt: skip
        code, *printed = call(*arguments)
        shown += "".join(printed)
        assert code in (0, 1, 2)
    with pytest.raises(dn.DecomposableError) as caught:
        dn.load(path, model=build())
    shown += str(caught.value) + str(dn.load(path, model=model).plan())
    assert r"\x1b]0;owned\x07\x1b[2J\n\u202eadresu" in shown
    assert all(letter.isprintable() or letter == "\n" for letter in shown)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resize", "FILE", "-o", "OUT"], ["exactly one of --macs, --params and --ratio", "none"]),
        (["resize", "FILE", "--macs", "0.5", "--ratio", "0.5", "-o", "OUT"], ["--macs and --ratio"]),
        (["resize", "FILE", "--macs", "0.001", "-o", "OUT"], ["macs=0.001 is too small", "smallest possible is"]),
        (["resize", "FILE", "--macs", "0", "-o", "OUT"], ["macs=0", "(0, 1]"]),
        (["resize", "FILE", "--macs", "-3", "-o", "OUT"], ["macs=-3", "(0, 1]"]),
        (["resize", "FILE", "--macs", "1.5", "-o", "OUT"], ["macs=1.5", "(0, 1]"]),
        (["resize", "FILE", "--macs", "nan", "-o", "OUT"], ["macs=nan", "(0, 1]"]),
        (["resize", "FILE", "--macs", "lots", "-o", "OUT"], ["--macs lots", "0.25, 25%", "45M"]),
        (["resize", "FILE", "--ratio", "2", "-o", "OUT"], ["ratio=2", "(0, 1]"]),
        (["resize", "FILE", "--macs", "0.5", "-o", "OUT.txt"], [".txt", ".safetensors"]),
        (["resize", "FILE", "--macs", "0.5"], ["-o"]),
        (["resize", "FILE", "--macs", "0.5", "-o", "OUT", "--as", "pickle"], ["pickle", "state-dict", "artifact"]),
        (["sizes", "FILE", "--accuracy-drop", "-1"], ["--accuracy-drop -1", "0 to 100"]),
        (["sizes", "FILE", "--accuracy-drop", "nan"], ["--accuracy-drop nan", "0 to 100"]),
        (["sizes", "FILE", "--accuracy-drop", "much"], ["--accuracy-drop", "much"]),
        (["evaluate", "FILE", "--sizes", ","], ["--sizes", "no size"]),
        (["evaluate", "FILE", "--sizes", "1,x"], ["--sizes x"]),
        (["evaluate", "FILE", "--sizes", "1,0.0001"], ["macs=0.0001 is too small"]),
        (["evaluate", "FILE", "--sizes", "1", "--params", "1"], ["--sizes and --params", "one of them"]),
        (["evaluate", "FILE", "--recipe", "digit"], ["did you mean digits"]),
        (["evaluate", "FILE", "--recipe", "cifar10-resnet20"], ["layer '0'", "network.safetensors"]),
        (["evaluate", "FILE", "--device", "abacus"], ["--device abacus", "cpu"]),
        (["evaluate", "FILE", "--device", "meta"], ["--device meta", "cpu"]),
        (["evaluate", "FILE", "--workers", "-1"], ["--workers", "at least 0"]),
        (["evaluate", "FILE", "--data", "NEW"], ["--data", "brings its own data"]),
        (["sizes", "FILE", "--data", "NEW"], ["--data and --recipe are for --accuracy-drop"]),
        (["resize", "FILE", "--macs", "0.5", "-o", "DEEP"], ["there is no folder"]),
        (["train", "digits", "--out", "NEW", "--data", "NEW"], ["brings its own data"]),
        (["train", "digits", "--out", "NEW", "--device", "meta"], ["--device meta"]),
        (["train", "digits", "--dry-run", "--set", "method=plan"], ["method=plan", "plain"]),
        (["train", "torch:relu", "--out", "NEW"], ["relu", "not a Python function"]),
        (["train", ":f", "--out", "NEW"], ["recipe :f", "package.module:f"]),
        (["train", "own:", "--out", "NEW"], ["recipe own:", "own:function"]),
        (["train", "own.py:f", "--out", "NEW"], ["own.py:f", "own:f"]),
        (
            ["train", "digits", "--out", "NEW", "--set", "lr=1"],
            ["no setting is called lr", "did you mean learning_rate"],
        ),
        (["train", "digit", "--out", "NEW"], ["unknown recipe digit", "did you mean digits"]),
        (["train", "digits"], ["--out is needed"]),
        (
            ["train", "digits", "--out", "NEW", "--set", "epoch=1"],
            ["no setting is called epoch", "did you mean epochs"],
        ),
        (["train", "digits", "--out", "NEW", "--set", "epochs=x"], ["epochs=x", "an int"]),
        (
            ["train", "digits", "--out", "NEW", "--set", "method=magic"],
            ["method=magic", "plain, decomposable, elastic"],
        ),
        (
            ["train", "digits", "--out", "NEW", "--set", "method=us-net", "widths=0.5,1"],
            [
                "method=us-net: it is one of the laboratory, decomposable-lab",
                "pip install",
                "plain, decomposable, elastic",
            ],
        ),
        *(
            ([verb, *more], ["is one of the laboratory, decomposable-lab", "pip install", "./laboratory"])
            for verb, *more in (["compare", "digits", "--out", "NEW"], ["report", "NEW"], ["exhibits", "2b", "--help"])
        ),
        (["train", "digits", "--out", "NEW", "--set", "batch_size=5000"], ["batch_size=5000", "1,000"]),
        (["train", "digits", "--out", "NEW", "--set", "train_images=3"], ["train_images=3", "from 10"]),
        (["train", "digits", "--out", "NEW", "--device", "abacus"], ["--device abacus"]),
        (["train", "digits", "--out", "FILE"], ["--out", "it is a file"]),
        (["train", "cifar10-resnet20", "--out", "NEW"], ["--data", "https://www.cs.toronto.edu"]),
        (["train", "no_such_module:f", "--out", "NEW"], ["no_such_module cannot be imported"]),
        (["train", "digits", "--out", "NEW", "--checkpoint-seconds", "x"], ["--checkpoint-seconds"]),
        (["train", "digits", "--out", "NEW", "--checkpoint-seconds", "-1"], ["--checkpoint-seconds -1", "at least 0"]),
    ],
)
def test_a_wrong_call_is_one_line_and_changes_nothing(file, call, tmp_path, arguments, words):
    places = {
        "FILE": file,
        "OUT": tmp_path / "out.safetensors",
        "OUT.txt": tmp_path / "out.txt",
        "NEW": tmp_path / "new",
        "DEEP": tmp_path / "no" / "out.safetensors",
    }
    before = contents(tmp_path)
    code, out, err = call(*(places.get(argument, argument) for argument in arguments))
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert contents(tmp_path) == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "EMPTY"], ["EMPTY", "CIFAR-10"]),
        (["--data", "ABSENT"], ["ABSENT"]),
        (["--init", "ABSENT", "--data", "GOOD"], ["ABSENT", "no such file"]),
        (["--init", "NOISE", "--data", "GOOD"], ["NOISE", "damaged"]),
        (["--init", "TEXT", "--data", "GOOD"], ["TEXT", "damaged"]),
        (["--init", "OTHER", "--data", "GOOD"], ["OTHER", "another model"]),
        (["--init", "CLASSES", "--data", "GOOD"], ["CLASSES", "'linear.weight' has shape (7, 64)", "classes"]),
    ],
)
def test_a_training_that_cannot_start_leaves_nothing_behind(call, tmp_path, arguments, words):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "NOISE.pt").write_bytes(b"nonsense")
    (tmp_path / "TEXT.pt").write_text("words of text\n")
    torch.save(models.small_cnn().state_dict(), tmp_path / "OTHER.pt")
    torch.save(models.resnet20(num_classes=7).state_dict(), tmp_path / "CLASSES.pt")
    good = tmp_path / "GOOD" / "cifar-10-batches-bin"
    good.mkdir(parents=True)
    record = bytes(3073)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (good / name).write_bytes(record * 2)
    paths = {name: tmp_path / name for name in ("EMPTY", "ABSENT", "GOOD")}
    paths |= {name: tmp_path / f"{name}.pt" for name in ("NOISE", "TEXT", "OTHER", "CLASSES")}
    before = contents(tmp_path)
    options = [paths.get(argument, argument) for argument in arguments]
    code, out, err = call("train", "cifar10-resnet20", *options, "--out", tmp_path / "run", "--set", "batch_size=5")
    assert (code, out) == (1, ""), err
    assert err.count("\n") == 1, err
    assert all(word in err for word in words), err
    assert contents(tmp_path) == before
    assert not (tmp_path / "run").exists()


def test_a_model_with_another_number_of_classes_than_the_data(call, tmp_path, monkeypatch):
    (tmp_path / "wrong_classes_recipe.py").write_text(
        "from decomposable import models\n"
        "from decomposable.recipes import Task\n"
        "from decomposable.recipes.small import digits\n"
        "def f():\n"
        "    return Task(build_model=lambda: models.small_cnn(num_classes=3), load_data=digits().load_data)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, _, err = call("train", "wrong_classes_recipe:f", "--out", "run", "--set", "batch_size=50")
    assert code == 1
    assert "the network has 3 classes, the data has 10" in err
    assert not (tmp_path / "run").exists()


def test_the_dry_run_shows_every_setting_and_writes_nothing(call, tmp_path):
    code, out, _ = call("train", "cifar10-vgg15", "--dry-run", "--out", tmp_path / "run", "--set", "epochs=3")
    assert code == 0
    assert "epochs=3\n" in out
    assert "ratio=0.01,0.25\n" in out
    assert not (tmp_path / "run").exists()
    code, out, _ = call("train", "cifar10-vgg15", "--dry-run", "--json")
    assert json.loads(out)["weight_decay"] == 5e-4


# --- parts ---------------------------------------------------------------------------------------------------------


def test_sizes_as_they_are_typed():
    typed = ["0.25", "25%", "1", "45M", "1.5k", "2G", "45000000", " 0.5 "]
    assert [parse_size("--macs", t) for t in typed] == [0.25, 0.25, 1, 45_000_000, 1500, 2 * 10**9, 45_000_000, 0.5]
    assert parse_sizes("--sizes", "1, 50%,,") == [("1", 1), ("50%", 0.5)]
    for wrong in ("", "%", "M", "a", "1,5", "0x10"):
        with pytest.raises(InvalidArgumentError, match="not a size"):
            parse_size("--macs", wrong)


def test_a_table_is_aligned():
    assert as_table(("a", "bb"), [("10", "x")]) == " a  bb\n10   x"


def test_a_training_and_a_measurement_leave_a_figure(tmp_path, call):
    quick = ["epochs=1", "train_images=100", "calibration_images=50", "sizes=1,0.5,0.25"]
    code, out, _ = call("train", "digits", "--out", tmp_path / "run", "--set", *quick)
    assert code == 0
    assert f"The figure is {tmp_path / 'run' / 'curve.png'}" in out
    network = tmp_path / "run" / "network.safetensors"
    code, out, _ = call("bench", network, "--seconds", "0.2", "--runtime", "torch", "--sizes", "0.5")
    assert code == 0
    for figure in (tmp_path / "run" / "curve.png", network.with_name("network.safetensors.latency.png")):
        assert figure.read_bytes().startswith(b"\x89PNG")
    assert str(network.with_name("network.safetensors.latency.png")) in out


def test_train_says_why_there_is_no_figure(tmp_path, call):
    quick = ["epochs=1", "train_images=100", "calibration_images=50", "sizes=1"]
    code, out, _ = call("train", "digits", "--out", tmp_path / "run", "--set", *quick)
    assert code == 0
    assert "No figure: fewer than two sizes were measured" in out
