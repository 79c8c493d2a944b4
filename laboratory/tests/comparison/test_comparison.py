"""Comparing methods: what is trained, in what order, once; and what comes out."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from torch import nn

import decomposable as dn
import decomposable_lab as lab
from decomposable.data import digits
from decomposable.progress import Progress
from decomposable.recipes import small
from decomposable.training import methods
from decomposable.training.evaluation import WrongDataError, accuracy
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.commands import main as cli
from decomposable_lab.commands.compare import as_text
from decomposable_lab.comparison import results, running
from decomposable_lab.comparison.estimate import START_SECONDS, Estimate, estimate, total_seconds
from decomposable_lab.comparison.figure import figure_of, measured_by
from decomposable_lab.comparison.parts import plan
from decomposable_lab.comparison.running import PartsFailedError
from decomposable_lab.comparison.watching import Watch, Watchers

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
SOURCE = Path(dn.__file__).parents[1]
SOURCES = os.pathsep.join([str(SOURCE), str(Path(lab.__file__).parents[1])])
QUICK = {
    "epochs": 2,
    "train_images": 200,
    "calibration_images": 100,
    "sizes": (1.0, 0.5, 0.25),
    "compare_energies": (0.95,),
    "compare_strengths": (3e-4,),
    "tuning_epochs": 1,
    "evaluate_every": 2,
}
AS_TEXT = [f"{k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in QUICK.items()]


def command(out, *more, names="all", settings=AS_TEXT):
    return [
        *(sys.executable, "-m", "decomposable_lab", "compare", "digits", "--out", str(out), "--methods", names),
        *(*more, "--set", *settings),
    ]


def environment():
    return {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}


def run(out, *more, **options):
    return subprocess.run(command(out, *more, **options), capture_output=True, text=True, env=environment())


@pytest.fixture(scope="module")
def everything(made_once):
    """All methods, reduced, two trainings at a time: the folder, and what was said."""

    def fill(out):
        result = run(out, "--jobs", "2")
        assert result.returncode == 0, result.stderr
        return result.stdout, result.stderr

    out, said = made_once("comparison", fill)
    return out, *said


@pytest.fixture
def copied(everything, tmp_path):
    """A copy of it, to go on in."""
    return shutil.copytree(everything[0], tmp_path / "copy")


@pytest.mark.slow
def test_every_method_leaves_a_record_with_its_sizes(everything):
    out = everything[0]
    for name in methods.METHODS:
        record = json.loads((out / name / "0" / "record.json").read_text())
        assert record["sizes"], name
        for row in record["sizes"]:
            assert row["macs"] > 0
            assert row["params"] > 0
            assert 0 <= row["accuracy"] <= 100
            assert row["curve"]
        assert str(out) not in json.dumps(record)  # where somebody keeps their files is not part of a record
        assert record["seed"] == 0
        assert record["recipe"] == "digits"
        assert record["commit"] or not (SOURCE.parent / ".git").exists()


@pytest.mark.slow
def test_the_curves_have_the_names_of_the_paper(everything):
    out = everything[0]
    content = json.loads((out / "comparison.json").read_text())
    assert list(content["methods"]) == list(methods.METHODS)
    curves = {name: set(method["curves"]) for name, method in content["methods"].items()}
    assert curves["plain"] == {f"base_{f}_{c}" for f in ("sp", "ch") for c in ("sv", "eng", "uni", "tay")}
    assert curves["tucker"] == {"tucker_vbmf_ft", "ch_vbmf_ft", "sp_vbmf_ft"}
    assert curves["trp"] == {"trp_sp 0.95-0.0003", "trp_ch 0.95-0.0003"}
    assert len(content["methods"]["width"]["shown"]["points"]) == 2
    assert content["methods"]["plain"]["shown"]["label"] == "best of 8"


@pytest.mark.slow
def test_networks_trained_from_scratch_have_the_ranks_of_decomposable_net(everything):
    out = everything[0]
    [row] = json.loads((out / "scratch" / "0" / "record.json").read_text())["sizes"]
    ours = json.loads((out / "decomposable" / "0" / "record.json").read_text())["sizes"]
    assert row["macs"] == next(r["macs"] for r in ours if r["size"] == 0.25)


@pytest.mark.slow
def test_every_network_can_be_loaded_and_has_the_accuracy_that_its_record_says(everything):
    out = everything[0]
    data = digits.load_data(train_images=200)
    checked = 0
    for path in sorted(out.rglob("network.safetensors")):
        record = json.loads((path.parent / "record.json").read_text())
        net = lab.load(path, model=dn.models.small_cnn())
        rows = [row for row in record["sizes"] if row["curve"] == record["sizes"][0]["curve"]]
        for row in rows:
            net.resize_(macs=row["macs"])
            extracted = net.extract()
            assert net.plan().macs == row["macs"], path
            assert sum(p.numel() for p in extracted.parameters()) == row["params"]
            assert accuracy(extracted, data) == pytest.approx(row["accuracy"], abs=0.2)  # another batch size
            assert not any(isinstance(m, lab.SizedNet | dn.DecomposedNet) for m in extracted.modules())
        checked += 1
    assert checked == 2 + 1 + 1 + 2 + 3 + 1 + 1 + 1 + 1


@pytest.mark.slow
def test_the_figure_is_drawn_and_the_table_printed(everything):
    out, printed, errors = everything
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    for name in methods.METHODS:
        assert any(line.split()[:1] == [name] for line in printed.splitlines())
    assert "Traceback" not in errors


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.suffix in (".safetensors", ".jsonl")}


@pytest.mark.slow
def test_the_same_command_again_trains_nothing(everything, copied):
    out, printed, _ = everything
    before = contents(copied)
    again = run(copied, "--jobs", "2")
    assert again.returncode == 0
    assert again.stdout == printed.replace(str(out), str(copied))
    assert contents(copied) == before
    assert "trainings are done already" in again.stderr


@pytest.mark.slow
def test_a_dry_run_tells_what_is_done_and_writes_nothing(everything, tmp_path):
    out = everything[0]
    result = run(out, "--dry-run", "--json")
    assert {row["state"] for row in json.loads(result.stdout)["trainings"]} == {"done"}
    result = run(tmp_path / "new", "--dry-run", "--seeds", "0,1", names="tucker,us-net")
    assert result.returncode == 0, result.stderr
    assert "plain is trained as well: tucker starts from it" in result.stdout
    assert "about" in result.stdout
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_other_settings_in_the_same_folder_are_refused(everything):
    out = everything[0]
    before = contents(out)
    result = run(out, settings=[*AS_TEXT, "learning_rate=0.05"])
    assert result.returncode == 2
    assert "learning_rate=0.1, now it is 0.05" in result.stderr.rstrip().split("\n")[-1]
    assert contents(out) == before


@pytest.mark.slow
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_comparison_that_is_stopped_goes_on_to_the_same_numbers(tmp_path, jobs):
    names, settings = "us-net,slimmable", [*AS_TEXT, "epochs=6", "sizes=1,0.5"]
    whole = run(tmp_path / "whole", "--jobs", jobs, names=names, settings=settings)
    assert whole.returncode == 0, whole.stderr
    stopped = tmp_path / "stopped"
    process = subprocess.Popen(
        command(stopped, "--jobs", jobs, "--checkpoint-seconds", "0", names=names, settings=settings),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    deadline = time.monotonic() + 90
    while not list(stopped.rglob("checkpoint.pt")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "error" not in err
    assert not (stopped / "us-net/0/record.json").exists() or not (stopped / "slimmable/0/record.json").exists()
    again = run(stopped, "--jobs", jobs, names=names, settings=settings)
    assert again.returncode == 0, again.stderr
    for name in ("us-net", "slimmable"):
        rows = [
            json.loads((tmp_path / which / name / "0" / "record.json").read_text())["sizes"]
            for which in ("whole", "stopped")
        ]
        assert rows[0] == rows[1]
    networks = [(tmp_path / which / "us-net/0/network.safetensors").read_bytes() for which in ("whole", "stopped")]
    assert networks[0] == networks[1]


@pytest.mark.slow
def test_a_training_that_fails_leaves_the_others_their_results(tmp_path):
    def brittle(settings=small.DIGITS):
        task = small.digits(settings)
        if settings.method == "slimmable":
            return dn.recipes.Task(
                build_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 9)), load_data=task.load_data
            )
        return task

    said = []
    with pytest.raises(PartsFailedError, match=r"slimmable/0: .*9 classes.*the others are done"):
        lab.compare(brittle, out=tmp_path / "out", methods=["slimmable", "plain"], jobs=1, say=said.append, **QUICK)
    assert (tmp_path / "out" / "plain" / "0" / "record.json").exists()
    assert any("slimmable/0 failed" in line for line in said)
    content = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(content["methods"]) == ["plain"]  # what is done is shown all the same
    assert "9 classes" in content["failed"]["slimmable/0"]
    with pytest.raises(InvalidArgumentError, match="cannot be sent to another process"):
        lab.compare(brittle, out=tmp_path / "two", methods=["slimmable", "plain"], jobs=2, **QUICK)


_RECIPE = """
import os
import time
import decomposable as dn
from decomposable.recipes import small

KIND = os.environ["KIND"]


def trouble(settings=small.DIGITS):
    def load():
        if KIND == "slow" and settings.method == "us-net":
            time.sleep(8)
        return small.digits(settings).load_data()

    def loss(net, batch):
        if KIND == "raises" and settings.method == "us-net":
            raise RuntimeError("out of memory")
        if KIND == "dies" and settings.method == "us-net":
            os._exit(9)
        if KIND == "slow":
            time.sleep(0.02)
        return dn.recipes.cross_entropy(net, batch)

    return dn.recipes.Task(build_model=small.digits(settings).build_model, load_data=load, loss=loss)
"""


def troubled(folder, kind, *more, settings=AS_TEXT, **how):
    (folder / "troubled_recipe.py").write_text(_RECIPE)
    arguments = ["compare", "troubled_recipe:trouble", "--out", "out", *more, "--set", *settings]
    return subprocess.Popen(
        [sys.executable, "-m", "decomposable_lab", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**environment(), "KIND": kind},
        **how,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "jobs", "reason"),
    [("raises", "1", "out of memory"), ("raises", "2", "out of memory"), ("dies", "2", "killed")],
)
def test_whatever_a_training_does_the_others_are_shown(tmp_path, kind, jobs, reason):
    process = troubled(tmp_path, kind, "--methods", "us-net,width,plain", "--jobs", jobs)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1
    last = err.rstrip().split("\n")[-1]
    assert "us-net/0" in last
    assert reason in last
    assert "Traceback" not in err
    assert "plain" in out
    assert (tmp_path / "out" / "comparison.png").exists()
    assert (tmp_path / "out" / "width" / "0" / "record.json").exists()
    assert (tmp_path / "out" / "us-net" / "0" / "error.txt").exists() == (kind == "raises")


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_stopping_while_one_still_loads_its_data_costs_the_other_nothing(tmp_path):
    more = ("--methods", "plain,us-net", "--jobs", "2", "--checkpoint-seconds", "600")
    process = troubled(tmp_path, "slow", *more, settings=[*AS_TEXT, "epochs=100"])
    wait_for(lambda: (tmp_path / "out" / "plain" / "0" / "metrics.jsonl").exists())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped with 2 of 2 trainings to go" in err.rstrip().split("\n")[-1]
    assert (tmp_path / "out" / "plain" / "0" / "checkpoint.pt").exists()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.slow
def test_ctrl_c_while_the_processes_are_starting_shows_no_traceback(tmp_path):
    """The terminal sends it to all of the group, also to those that have no handler yet."""
    more = ("--methods", "plain,width", "--jobs", "2")
    process = troubled(tmp_path, "slow", *more, settings=[*AS_TEXT, "epochs=100"], start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: len(children.read_text().split()) >= 3)  # with multiprocessing's own
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130
    assert out == ""
    assert "stopped with 3 of 3 trainings to go" in err.rstrip().split("\n")[-1]  # width has two
    assert "Traceback" not in err
    assert "error" not in err


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_no_process_outlives_a_parent_that_was_killed(tmp_path):
    more = ("--methods", "plain,width", "--jobs", "2", "--checkpoint-seconds", "600")
    process = troubled(tmp_path, "slow", *more, settings=[*AS_TEXT, "epochs=100"])
    wait_for(lambda: (tmp_path / "out" / "plain" / "0" / "metrics.jsonl").exists())
    process.kill()
    process.communicate(timeout=60)

    def is_empty():
        places = [path / "cwd" for path in Path("/proc").iterdir() if path.name.isdigit()]
        return not any(_target(place) == tmp_path for place in places)

    wait_for(is_empty)
    assert (tmp_path / "out" / "plain" / "0" / "checkpoint.pt").exists()


def _target(link):
    try:
        return link.resolve(strict=True)
    except OSError:
        return None


@pytest.mark.slow
def test_a_method_or_a_sweep_is_added_to_what_is_there(copied):
    out = copied
    before = contents(out)
    result = run(out, "--jobs", "2", names="plain")  # the others are still there, and shown
    assert result.returncode == 0, result.stderr
    assert list(json.loads((out / "comparison.json").read_text())["methods"]) == list(methods.METHODS)
    dry = run(out, "--dry-run", "--json", settings=[*AS_TEXT, "compare_energies=0.95,0.97"])
    states = {row["training"]: row["state"] for row in json.loads(dry.stdout)["trainings"] if row["method"] == "trp"}
    assert sorted(states.values()) == ["done", "done", "to do", "to do"]
    assert contents(out) == before


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_sizes_that_were_not_measured_are_not_passed_off_as_measured(everything, more):
    out = everything[0]
    result = run(out, *more, names="plain", settings=[*AS_TEXT, "sizes=1,0.75,0.1"])
    assert result.returncode == 2
    assert "sizes" in result.stderr
    assert result.stderr.rstrip().endswith("allowed: the same settings, or another folder")


def grouped(settings=small.DIGITS):
    def build():
        return nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=4), nn.Flatten(), nn.Linear(128, 10))

    return dn.recipes.Task(build_model=build, load_data=small.digits(settings).load_data)


def test_a_dry_run_says_which_method_cannot_train_the_model(tmp_path):
    comparison, circumstances = running.prepare(grouped, out=tmp_path / "out", names=["plain", "us-net"])
    plain, us_net = estimate(comparison, circumstances, jobs=1, progress=lambda text: None)
    assert (plain.state, plain.reason) == ("to do", "")
    assert plain.seconds > 0
    assert us_net.state == "cannot"
    assert "groups=4" in us_net.reason


@pytest.mark.slow
def test_two_comparisons_in_one_folder_are_refused(tmp_path):
    more = ("--methods", "plain", "--jobs", "1")
    first = troubled(tmp_path, "slow", *more, settings=[*AS_TEXT, "epochs=100"])
    wait_for(lambda: (tmp_path / "out" / "plain" / "0" / "metrics.jsonl").exists())
    second = troubled(tmp_path, "slow", *more, settings=[*AS_TEXT, "epochs=100"])
    _, err = second.communicate(timeout=60)
    first.kill()
    first.communicate()
    assert second.returncode == 1
    assert "another process is running in it" in err


def test_a_part_comes_after_what_it_needs(tmp_path):
    comparison = plan("digits", small.DIGITS, ["tucker", "scratch"], [3, 4], tmp_path)
    assert comparison.added == {"plain": "tucker", "decomposable": "scratch"}
    assert comparison.methods == ("scratch", "tucker")
    seen = set()
    for part in comparison.parts:
        assert set(part.needs) <= seen
        assert part.settings.seed == part.seed
        seen.add(part.path)
    assert len({part.path for part in comparison.parts}) == len(comparison.parts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--methods", "us_nets"], ["us_nets", "did you mean us-net?", "decomposable"]),
        (["--methods", ""], ["--methods", "none", "allowed"]),
        (["--seeds", "a"], ["--seeds a", "allowed"]),
        (["--seeds", "-1"], ["--seeds -1", "allowed"]),
        (["--seeds", ""], ["--seeds", "none"]),
        (["--jobs", "0"], ["--jobs 0", "at least 1"]),
        (["--set", "widths=0.5,2"], ["widths=0.5,2", "parts of the channels"]),
        (["--set", "tuning_schedules=linear"], ["tuning_schedules=linear", "polynomial:POWER"]),
        (["--set", "compare_energies=1.5"], ["compare_energies=1.5", "allowed"]),
        (["--set", "method=plain"], ["method=plain", "a comparison sets it itself", "--methods"]),
        (["--set", "seed=3"], ["seed=3", "--seeds"]),
        (["--set", "trp_energy=0.9"], ["trp_energy=0.9", "compare_energies"]),
        (["--set", "width_range=0.25,0.5"], ["width_range=0.25,0.5", "largest width of 1"]),
        (["--checkpoint-seconds", "-3"], ["--checkpoint-seconds -3", "at least 0"]),
        (["--checkpoint-seconds", "nan", "--dry-run"], ["--checkpoint-seconds nan"]),
    ],
)
def test_a_wrong_call_is_one_line_and_changes_nothing(tmp_path, capsys, arguments, words):
    code = cli.main(["compare", "digits", "--out", str(tmp_path / "out"), *arguments])
    err = capsys.readouterr().err
    assert code == 2
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert not (tmp_path / "out").exists()


def test_without_a_folder_it_says_what_is_missing(capsys):
    assert cli.main(["compare", "digits"]) == 2
    assert "--out is needed" in capsys.readouterr().err


def row(size, accuracy, macs=None, curve="a"):
    macs = size * 1000 if macs is None else macs
    fractions = {"macs_fraction": macs / 1000, "params_fraction": size}
    return {"size": size, "macs": macs, "params": 10, "accuracy": accuracy, "curve": curve, **fractions}


def test_mean_and_range_over_seeds():
    points = results.mean_over_seeds([[row(1.0, 90), row(0.5, 80)], [row(0.5, 84), row(1.0, 92)]], "a")
    assert [(p.size, p.accuracy, p.lowest, p.highest, p.seeds) for p in points] == [
        (1.0, 91, 90, 92, 2),
        (0.5, 82, 80, 84, 2),
    ]


def test_a_text_is_shown_by_its_perplexity():
    def texts(*found):
        return [{**row(size, 50), "perplexity": value} for size, value in zip((1.0, 0.5, 0.25), found, strict=True)]

    points = results.mean_over_seeds([texts(4.0, 4.5, 6.0), texts(4.2, 4.7, 7.0)], "elastic")
    assert points[0].perplexity == (pytest.approx(4.1), 4.0, 4.2)
    shown = {"label": "elastic", "points": [asdict(point) for point in points]}
    content = {"recipe": "text", "seeds": [0, 1], "sizes": [1.0, 0.5, 0.25]}
    content["methods"] = {"elastic": {"shown": shown, "curves": {"elastic": shown["points"]}}}
    assert "perplexity of the test text" in as_text(content)
    assert "4.60 ±0.10" in as_text(content)
    drawn = figure_of(content).axes[0]
    assert "perplexity" in drawn.get_ylabel()
    assert drawn.get_ylim()[0] < 4.0 < 7.0 < drawn.get_ylim()[1] < 8.0


def test_where_one_method_has_no_perplexity_all_are_shown_by_accuracy():
    with_it = results.mean_over_seeds([[{**row(1.0, 50), "perplexity": 4.0}]], "a")
    without = results.mean_over_seeds([[row(1.0, 50)]], "b")
    methods = {
        name: {"shown": {"points": [asdict(p) for p in points]}} for name, points in (("a", with_it), ("b", without))
    }
    assert measured_by({"methods": methods}) == "accuracy"


def test_sizes_that_only_one_seed_has_are_left_out():
    points = results.mean_over_seeds([[row(1.0, 90), row(0.5, 80), row(0.1, 10)], [row(1.0, 92), row(0.5, 84)]], "a")
    assert [p.size for p in points] == [1.0, 0.5]


def test_the_best_curve_at_each_size_stands_for_a_method():
    first = results.mean_over_seeds([[row(1.0, 90), row(0.5, 80)]], "first")
    second = results.mean_over_seeds([[row(1.0, 89), row(0.5, 85)]], "second")
    label, best = results.representative({"first": first, "second": second})
    assert label == "best of 2"
    assert [(p.accuracy, p.curve) for p in best] == [(90, "first"), (85, "second")]
    other = results.mean_over_seeds([[row(0.3, 70)]], "other")  # of other sizes: the most accurate one counts
    assert results.representative({"other": other, "first": first}) == ("first", first)


def test_the_estimate_is_at_least_what_comes_one_after_the_other(tmp_path):
    comparison = plan("digits", small.DIGITS, ["plain", "tucker"], [0], tmp_path)
    estimates = [Estimate(part=part, state="to do", seconds=10.0) for part in comparison.parts]
    assert total_seconds(estimates, 1) == 10.0 * len(estimates)
    assert total_seconds(estimates, 100) == START_SECONDS + 20.0


def test_jobs_by_default_are_one_on_a_gpu_and_few_on_a_cpu():
    assert running.number_of_jobs(None, "cuda") == 1
    assert 1 <= running.number_of_jobs(None, "cpu") <= running.MOST_JOBS
    assert running.number_of_jobs(7, "cpu") == 7


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_without_data_it_says_so_in_one_line_before_it_starts_anything(tmp_path, capsys, monkeypatch, jobs):
    monkeypatch.setattr(running, "side_by_side", lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr(running, "one_by_one", lambda *_: pytest.fail("a training was started"))
    code = cli.main(["compare", "cifar10-resnet20", "--out", str(tmp_path / "out"), "--jobs", jobs])
    out, err = capsys.readouterr()
    trained = cli.main(["train", "cifar10-resnet20", "--out", str(tmp_path / "out")])
    assert (code, out) == (trained, "")
    assert err == capsys.readouterr().err.replace("decomposable train", "decomposable-lab compare")
    assert err.count("\n") == 1
    assert "--data is needed" in err
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_whose_model_does_not_fit_its_data_is_refused_before_it_starts_anything(tmp_path):
    def wrong(settings=small.DIGITS):
        return dn.recipes.Task(
            build_model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 7)),
            load_data=small.digits(settings).load_data,
        )

    with pytest.raises(WrongDataError, match="7 classes, the data has 10"):
        lab.compare(wrong, out=tmp_path / "out", methods=["plain", "width"], jobs=1)
    assert list(tmp_path.iterdir()) == []


TINY = {**QUICK, "epochs": 1, "train_images": 100, "sizes": (1.0,)}
TINY_TEXT = [f"{k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in TINY.items()]


def tiny(out, *more):
    return ["compare", "digits", "--out", str(out), "--methods", "slimmable", "--jobs", "1", *more, "--set", *TINY_TEXT]


def test_it_shows_at_once_what_it_does_and_the_time_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(tiny(tmp_path / "out")) == 0
    shown = capsys.readouterr().err.split("\r")[1:]
    assert shown[0].startswith("reading the recipe")
    assert shown[1].startswith("checking recipe and data")
    assert shown[2].startswith("comparing: 0 of 1 done")
    assert any(line.startswith("comparing: 0 of 1 done  |  slimmable/0") for line in shown[3:])
    training = [line for line in shown if "epoch 1/1, step" in line]
    assert training
    assert " s left" in training[0]


@pytest.mark.slow
def test_quiet_shows_results_only_and_verbose_more(tmp_path, capsys):
    assert cli.main(tiny(tmp_path / "quiet", "-q")) == 0
    out, err = capsys.readouterr()
    assert "slimmable" in out
    assert err == ""
    assert cli.main(tiny(tmp_path / "usual")) == 0
    usual = capsys.readouterr().err
    assert cli.main(tiny(tmp_path / "verbose", "-v")) == 0
    verbose = capsys.readouterr().err
    assert "[1/1] slimmable/0:" in usual
    assert "epoch 1/1" not in usual
    assert "slimmable/0: epoch 1/1  loss" in verbose


class Told:
    """What is shown, with a clock to be set."""

    def __init__(self, monkeypatch, names, jobs):
        self.now, self.lines, self.said = 0.0, [], []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        self.parts = [p for n in names for p in plan("digits", small.DIGITS, [n], [0], Path("out")).parts]
        self.watch = Watch(self.parts, jobs, Watchers(progress=self.lines.append, say=self.said.append))

    def left(self):
        return self.watch.seconds_left()


RECORD = {"sizes": [{"accuracy": 98.0, "macs_fraction": 1.0}], "training_seconds": 60.0}


def test_the_time_left_follows_from_what_the_trainings_say_and_took(monkeypatch):
    told = Told(monkeypatch, ["plain", "us-net", "slimmable"], jobs=1)
    plain, us_net, _ = told.parts
    told.watch.begin(plain)
    assert told.left() is None  # nobody knows yet
    told.now = 10
    told.watch.hear(plain, Progress("training", "epoch 1/4", fraction=0.1, seconds_left=90))
    assert told.left() == 90 + 2 * 100  # the others are thought to take as long
    told.now = 100
    told.watch.hear(plain, Progress("training", "epoch 4/4", fraction=1.0, seconds_left=0))
    told.now = 130
    told.watch.hear(plain, Progress("measuring", "5 of 10", seconds_left=20))
    assert told.left() == 20 + 2 * 150
    told.now = 150
    told.watch.end(plain, RECORD)
    assert told.said == ["[1/3] plain/0: 1.000 of the MACs, up to 98.00% (60 s of training)"]
    assert told.left() == 2 * 150
    told.watch.begin(us_net)
    told.now = 160
    told.watch.hear(us_net, Progress("training", "epoch 1/4", seconds_left=200))
    assert told.left() == 200 + 50 + (150 + 260) / 2  # with the 50 s for sizes that plain took after training
    told.watch.fail(us_net, "out of memory")
    assert told.left() == 150
    told.watch.show()
    assert told.lines[-1].startswith("comparing: 1 of 3 done")
    assert told.lines[-1].endswith(", 2 min left")
    assert told.lines[-1].fraction == pytest.approx(160 / (160 + 150))


def test_side_by_side_the_time_left_is_shared(monkeypatch):
    told = Told(monkeypatch, ["plain", "us-net", "slimmable"], jobs=2)
    plain, us_net, _ = told.parts
    for part, left in ((plain, 40), (us_net, 120)):
        told.watch.begin(part)
        told.watch.hear(part, Progress("training", "epoch 1/4", seconds_left=left))
    assert told.left() == 120 or told.left() == (40 + 120 + 80) / 2
    told.now = 130
    assert told.left() == 80  # that of slimmable; the others are late
    assert "plain/0 epoch 1/4  |  us-net/0 epoch 1/4" in (told.watch.show() or told.lines[-1])


def test_records_whose_networks_were_not_kept_are_not_trained_again(tmp_path):
    """As in a repository of results: records are small, networks are not."""
    quick = {"epochs": 1, "train_images": 100, "calibration_images": 50, "sizes": (1.0, 0.5)}
    lab.compare("digits", out=tmp_path, methods=["plain"], jobs=1, **quick)
    record = tmp_path / "plain" / "0" / "record.json"
    before = record.read_bytes()
    (tmp_path / "plain" / "0" / "network.safetensors").unlink()
    content = lab.compare("digits", out=tmp_path, methods=["plain", "width"], jobs=1, compare_widths=(0.5,), **quick)
    assert record.read_bytes() == before
    assert {"plain", "width"} <= content["methods"].keys()
    with pytest.raises(PartsFailedError, match="plain/0, which it starts from, is not there"):
        lab.compare("digits", out=tmp_path, methods=["tucker"], jobs=1, tuning_epochs=1, **quick)
