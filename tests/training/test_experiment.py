"""From a recipe to the files of a run, and killed on the way."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import Dataset

import decomposable as dn
from decomposable import recipes
from decomposable.data.base import FromDatasets, generator_for
from decomposable.recipes import small
from decomposable.training import experiment, methods
from decomposable.training.checkpoint import CheckpointError, Checkpoints, read_checkpoint
from decomposable.training.evaluation import accuracy
from decomposable.training.methods.flat import from_plain
from decomposable.training.methods.plain import Plain
from decomposable.training.metrics import read_metrics
from decomposable.training.runs import RunError
from decomposable.training.weights import read_weights
from decomposable_edge import files
from decomposable_edge.errors import DataError, InvalidArgumentError
from decomposable_edge.interrupts import Interrupted
from refusals import Saying, refused

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
SOURCE = Path(experiment.__file__).parents[2]
QUICK = ["epochs=3", "train_images=300", "calibration_images=100", "calibrated_sizes=0.3,0.5", "sizes=1,0.5,0.3"]


def command(out, *more, settings=QUICK):
    return [sys.executable, "-m", "decomposable", "train", "digits", "--out", str(out), *more, "--set", *settings]


def environment():
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def run(out, *more, settings=QUICK):
    return subprocess.run(command(out, *more, settings=settings), capture_output=True, text=True, env=environment())


@pytest.fixture(scope="module")
def whole(made_once):
    """A run that nobody disturbs: its folder, and what it printed."""

    def fill(out):
        result = run(out)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return made_once("run", fill)


def test_a_run_leaves_its_files_and_nothing_else(whole):
    out, printed = whole
    files = {path.name for path in out.iterdir()} - {"tensorboard"}
    assert files == {"network.safetensors", "metrics.jsonl", "record.json", "curve.png"}
    assert "test accuracy" in printed
    assert "network.safetensors" in printed


def test_the_record_says_where_the_figures_come_from(whole):
    record = json.loads((whole[0] / "record.json").read_text())
    assert record["recipe"] == "digits"
    assert (record["settings"]["epochs"], record["seed"], record["steps"]) == (3, 0, 18)
    assert record["settings"]["ratio"] == [0.01, 0.5]
    assert {"cpu", "threads", "torch"} <= record["machine"].keys()
    assert "commit" in record
    assert record["command"].startswith("decomposable train digits --out")
    assert [row["size"] for row in record["sizes"]] == [1, 0.5, 0.3]
    for row in record["sizes"]:
        assert row["macs"] <= row["size"] * record["sizes"][0]["macs"]
        assert 0 <= row["accuracy"] <= 100
    assert [line["epoch"] for line in record["epochs"]] == [1, 2, 3]


def test_records_name_no_folder_of_the_machine(whole):
    assert str(whole[0].parent) not in (whole[0] / "record.json").read_text()


def test_metrics_have_a_line_per_epoch(whole):
    epochs = [line for line in read_metrics(whole[0] / "metrics.jsonl") if line["kind"] == "epoch"]
    assert [line["step"] for line in epochs] == [6, 12, 18]
    assert all({"loss", "loss_low", "accuracy"} <= line.keys() for line in epochs)


def test_the_artifact_gives_the_accuracies_of_the_record(whole):
    task = recipes.make_task(recipes.find("digits"), None, small.DigitsSettings(train_images=300))
    net = dn.load(whole[0] / "network.safetensors", model=task.build_model())
    record = json.loads((whole[0] / "record.json").read_text())
    for row in record["sizes"]:
        net.resize_(macs=row["size"])
        assert accuracy(net, task.load_data()) == pytest.approx(row["accuracy"])
    assert net.info["recipe"] == "digits"
    assert net.info["sizes"] == record["sizes"]


@pytest.mark.slow  # test_resume.py cuts off runs of every method, in one process
@pytest.mark.parametrize(("method", "kills"), [("decomposable", 2), ("plain", 1)])
def test_a_run_killed_mid_epoch_ends_with_the_same_bits(tmp_path, method, kills):
    """SIGKILL gives a process no chance to tidy up. The network is compared byte by byte."""
    settings = [*QUICK, f"method={method}", "refresh=4", "epochs=10"]
    assert run(tmp_path / "whole", settings=settings).returncode == 0
    out = tmp_path / "killed"
    for k in range(kills):
        process = subprocess.Popen(
            command(out, "--resume", "--checkpoint-seconds", "0", settings=settings),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
        _wait_for_step(out, 2 + 7 * k, process)  # six steps are an epoch
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "record.json").exists()
    checkpoint = read_checkpoint(out / "checkpoint.pt")
    assert 0 < checkpoint["position"]["step"] < 60
    result = run(out, "--resume", settings=settings)
    assert result.returncode == 0, result.stderr
    assert "resuming at step" in result.stderr
    theirs, ours = ((folder / "network.safetensors").read_bytes() for folder in (tmp_path / "whole", out))
    assert theirs == ours
    logs = [_without_times(read_metrics(folder / "metrics.jsonl")) for folder in (tmp_path / "whole", out)]
    assert logs[0] == logs[1]


def _wait_for_step(out, step, process):
    for _ in range(6000):
        if process.poll() is not None:
            pytest.fail("the run ended before it could be killed")
        path = out / "checkpoint.pt"
        if path.exists() and read_checkpoint(path)["position"]["step"] >= step:
            return
        time.sleep(0.01)
    pytest.fail("no checkpoint within a minute")


def _tensors(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _without_times(lines):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.mark.slow
def test_sigterm_ends_in_one_line_that_says_how_to_go_on(tmp_path):
    process = subprocess.Popen(
        command(tmp_path / "run", "--checkpoint-seconds", "0", settings=[*QUICK, "epochs=300"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    _wait_for_step(tmp_path / "run", 2, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 130
    last = err.rstrip().split("\n")[-1]
    assert "stopped at step" in last
    assert "--resume" in last


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_ends_in_one_line_that_is_no_error_and_leaves_no_process(tmp_path, times):
    """The terminal sends it to the whole group; a second one does not wait for the step under way."""
    (tmp_path / "group_recipe.py").write_text(_GROUP_RECIPE)
    process = start_slow_run(tmp_path)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.01)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    last = err.rstrip().split("\n")[-1]
    assert last.startswith("decomposable train: ")
    assert "--resume goes on from" in last
    assert "error" not in err
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left in the group


@pytest.mark.slow  # a run that is killed is begun with --resume, too
def test_resume_without_a_checkpoint_simply_starts(tmp_path, whole):
    result = run(tmp_path / "new", "--resume")
    assert result.returncode == 0, result.stderr
    theirs, ours = (_tensors(folder / "network.safetensors") for folder in (whole[0], tmp_path / "new"))
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_finished_run_is_not_run_again(whole):
    before = {path: path.stat().st_mtime_ns for path in whole[0].iterdir()}
    result = run(whole[0], "--resume")
    assert result.returncode == 0
    assert "complete" in result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in whole[0].iterdir()}


@pytest.mark.slow
def test_an_old_run_is_never_overwritten(whole):
    before = {path: path.stat().st_mtime_ns for path in whole[0].iterdir()}
    result = run(whole[0])
    assert result.returncode == 2
    assert "there is a run in it" in result.stderr
    assert result.stderr.count("\n") == 1
    result = run(whole[0], "--resume", settings=[*QUICK, "seed=5"])
    assert result.returncode == 2
    assert "seed=0" in result.stderr
    assert before == {path: path.stat().st_mtime_ns for path in whole[0].iterdir()}


@pytest.mark.slow
def test_resuming_with_other_settings_is_refused(tmp_path):
    process = subprocess.Popen(
        command(tmp_path / "run", "--checkpoint-seconds", "0", settings=[*QUICK, "epochs=300"]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    _wait_for_step(tmp_path / "run", 1, process)
    process.kill()
    process.wait()
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    result = run(tmp_path / "run", "--resume", settings=[*QUICK, "epochs=300", "balance=0.3"])
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "balance=0.5, now it is 0.3" in result.stderr
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


@pytest.mark.slow
def test_training_from_the_artifact_of_another_run(tmp_path, whole):
    result = run(tmp_path / "next", "--init", str(whole[0] / "network.safetensors"), settings=[*QUICK, "epochs=1"])
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "next" / "record.json").read_text())
    assert record["init"]["file"] == "network.safetensors"
    first = json.loads((whole[0] / "record.json").read_text())
    assert record["epochs"][0]["loss"] < first["epochs"][0]["loss"]


def test_from_python_with_a_function_of_ones_own(tmp_path):
    own = dn.recipes.Settings(epochs=1, batch_size=50, calibrated_sizes=(0.5,), sizes=(0.5,))

    def mine(settings: dn.recipes.Settings = own):
        return recipes.find("digits")(small.DigitsSettings(train_images=200))

    record = dn.train(mine, out=tmp_path / "run", learning_rate=0.05)
    assert record["settings"]["learning_rate"] == 0.05
    assert record["steps"] == 4
    with pytest.raises(InvalidArgumentError, match="did you mean learning_rate"):
        dn.train(mine, out=tmp_path / "other", learning_rat=0.05)
    assert not (tmp_path / "other").exists()


class Noisy(Dataset):
    """Random images whose transform draws from every global generator; some are broken."""

    def __init__(self, count, broken=(), seconds=0.0):
        self.count, self.broken, self.seconds = count, broken, seconds

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index in self.broken:
            raise DataError(f"image {index} cannot be read")
        time.sleep(self.seconds)
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return torch.full((6,), float(index % 2)) + 0.1 * noise, index % 2


def network():
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 2))


NOISY = dn.recipes.Settings(epochs=3, batch_size=8, learning_rate=0.05, sizes=(1.0,), refresh=2)


def noisy(count=48, build=network, settings=NOISY, **options):
    """A recipe of one's own."""

    def recipe(settings: dn.recipes.Settings = settings):
        data = FromDatasets(classes=2, train=Noisy(count, **options), test=Noisy(16))
        return dn.recipes.Task(build_model=build, load_data=lambda: data)

    return recipe


class Killed(BaseException):
    """As abrupt as it gets inside a process."""


def kill_at(step):
    def progress(text):
        if f"step {step}/" in text:
            raise Killed

    return progress


def tensors(folder):
    return _tensors(folder / "network.safetensors")


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_resuming_with_other_workers_ends_with_the_same_bits(tmp_path, before, after):
    dn.train(noisy(), out=tmp_path / "whole")
    with pytest.raises(Killed):
        dn.train(noisy(), out=tmp_path / "cut", workers=before, checkpoint_seconds=0, progress=kill_at(4))
    dn.train(noisy(), out=tmp_path / "cut", workers=after, resume=True)
    whole, cut = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_killed_after_training_the_sizes_are_made_again(tmp_path):
    dn.train(noisy(), out=tmp_path / "whole")

    def progress(text):
        if text.startswith("measuring"):
            raise Killed

    with pytest.raises(Killed):
        dn.train(noisy(), out=tmp_path / "cut", progress=progress)
    assert not (tmp_path / "cut" / "record.json").exists()
    with files.replacing(tmp_path / "cut" / "network.safetensors") as unfinished:
        unfinished.touch()
    (tmp_path / "cut" / "network.safetensors").unlink()
    unfinished.parent.mkdir()  # as a kill in the middle of writing leaves it
    unfinished.write_bytes(b"half")
    dn.train(noisy(), out=tmp_path / "cut", resume=True)
    whole, cut = tensors(tmp_path / "whole"), tensors(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert {path.name for path in (tmp_path / "cut").iterdir()} - {"tensorboard"} == {
        "network.safetensors",
        "metrics.jsonl",
        "record.json",
    }
    kinds = [line["kind"] for line in read_metrics(tmp_path / "cut" / "metrics.jsonl")]
    assert kinds == ["epoch"] * 3 + ["sizes"]


def test_a_signal_after_training_says_how_to_go_on(tmp_path):
    def progress(text):
        if text.startswith("measuring"):
            os.kill(os.getpid(), signal.SIGTERM)

    settings = replace(NOISY, sizes=(1.0, 0.9))
    with pytest.raises(Interrupted, match=r"stopped after training.*--resume"):
        dn.train(noisy(settings=settings), out=tmp_path / "run", progress=progress)
    assert dn.train(noisy(settings=settings), out=tmp_path / "run", resume=True)["steps"] == 18


@pytest.mark.slow
def test_a_signal_to_the_whole_group_leaves_a_checkpoint(tmp_path):
    """As supervisors send it: the worker processes get it, too."""
    (tmp_path / "group_recipe.py").write_text(_GROUP_RECIPE)
    process = start_slow_run(tmp_path)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped at step" in err.rstrip().split("\n")[-1], err
    assert read_checkpoint(tmp_path / "run" / "checkpoint.pt")["position"]["step"] > 0


def start_slow_run(folder):
    """A run with worker processes, in a group of its own, that has made some steps."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "decomposable", "train", "group_recipe:slow", "--out", "run"),
            *("--checkpoint-seconds", "0", "--set", "workers=2"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
        start_new_session=True,
    )
    _wait_for_step(folder / "run", 3, process)
    return process


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finding worker processes needs Linux's /proc")
def test_a_worker_that_is_killed_ends_the_run_in_one_line(tmp_path):
    """As it happens where memory runs out."""
    (tmp_path / "group_recipe.py").write_text(_GROUP_RECIPE)
    process = start_slow_run(tmp_path)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    last = err.rstrip().split("\n")[-1]
    assert "a worker process" in last, err
    assert "Traceback" not in err


_GROUP_RECIPE = """
import time
import torch
from torch import nn
from torch.utils.data import Dataset
import decomposable as dn
from decomposable.data.base import FromDatasets, generator_for


class Slow(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((6,), float(index % 2)), index % 2


def slow(settings=dn.recipes.Settings(epochs=50, batch_size=8)):
    build = lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    return dn.recipes.Task(build_model=build, load_data=lambda: FromDatasets(classes=2, train=Slow(), test=Slow()))
"""


def test_an_error_of_the_data_crosses_from_a_worker_as_one_line(tmp_path):
    order = torch.randperm(48, generator=generator_for(0, "order", 0)).tolist()
    late = order[20]  # of the third batch: the first one is tried before anything begins
    for workers in (0, 2):
        with pytest.raises(DataError) as caught:
            dn.train(noisy(broken=(late,)), out=tmp_path / str(workers), workers=workers)
        assert str(caught.value) == f"image {late} cannot be read"
        assert (tmp_path / str(workers)).exists()


def test_other_data_is_not_gone_on_with(tmp_path):
    with pytest.raises(Killed):
        dn.train(noisy(), out=tmp_path / "run", checkpoint_seconds=0, progress=kill_at(4))
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with refused("train_images", 40, "train_images=48"):
        dn.train(noisy(40), out=tmp_path / "run", resume=True)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}


def test_a_finished_run_is_only_that_run(tmp_path):
    dn.train(noisy(), out=tmp_path / "run")
    said = []
    dn.train(noisy(), out=tmp_path / "run", resume=True, workers=1, sizes=(1.0, 0.9), say=said.append)
    assert said == ["this run is complete; nothing to do"]  # what has no effect on the weights may differ
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    with refused("init", allowed="init=None"):
        dn.train(noisy(), out=tmp_path / "run", resume=True, init=tmp_path / "weights.pt")
    with refused("epochs", 4, "epochs=3") as caught:
        dn.train(noisy(), out=tmp_path / "run", resume=True, epochs=4)
    assert "--init" in str(caught.value)
    (tmp_path / "run" / "network.safetensors").unlink()
    with refused(kind=RunError, what=Saying(r"network\.safetensors is gone$")):
        dn.train(noisy(), out=tmp_path / "run", resume=True)
    for content in ("{", "{}", "[]"):
        (tmp_path / "run" / "record.json").write_text(content)
        with refused(kind=RunError, what=Saying(r"^.*record\.json: ")):
            dn.train(noisy(), out=tmp_path / "run", resume=True)


def normalised():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )


CALIBRATED = {"calibrated_sizes": (0.6, 0.8, 1.0), "calibrated_alignments": (2,), "calibration_images": 20}


@pytest.mark.parametrize("criterion", ["singular_value", "energy"])
def test_changed_calibration_settings_calibrate_a_finished_run_anew(criterion, tmp_path, monkeypatch):
    """From the finished run's network: nothing is trained, and the statistics are those of a run that began so."""
    kept = {"criterion": criterion}
    dn.train(noisy(build=normalised), out=tmp_path / "expected", **kept, **CALIBRATED, sizes=(1.0, 0.9))
    before = dn.train(noisy(build=normalised), out=tmp_path / "run", **kept, calibrated_sizes=(0.7,))
    monkeypatch.setattr("decomposable.training.loop.train", None)  # never called
    said = []
    how = {"out": tmp_path / "run", "resume": True, "say": said.append, **kept}
    after = dn.train(noisy(build=normalised), **how, **CALIBRATED, sizes=(1.0, 0.9))
    assert said[0].startswith(
        "this run is complete; calibrating its network anew with calibrated_sizes=[0.6, 0.8, 1.0]"
    )
    expected, found = tensors(tmp_path / "expected"), tensors(tmp_path / "run")
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    statistics = dn.load(tmp_path / "run" / "network.safetensors", model=normalised()).artifact().statistics
    assert statistics.alignments == (1, 2)
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    assert record == json.loads(json.dumps(after))
    assert record["settings"]["calibrated_sizes"] == [0.6, 0.8, 1.0]
    assert [row["size"] for row in record["sizes"]] == [1.0, 0.9]
    for key in ("identity", "steps", "epochs", "training_seconds", "started", "commit"):
        assert record[key] == before[key]
    assert record["calibrated_anew"]["finished"] >= before["finished"]
    kinds = [line["kind"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert kinds == ["epoch"] * 3 + ["sizes"]
    assert dn.train(noisy(build=normalised), **how, **CALIBRATED) == record  # and now there is nothing to do
    assert said[-1] == "this run is complete; nothing to do"
    with refused("epochs", 4, "epochs=3"):
        dn.train(noisy(build=normalised), **how, epochs=4, calibration_images=30)


def test_calibrating_anew_with_other_data_is_refused(tmp_path):
    dn.train(noisy(build=normalised), out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with refused("train_images", 40, "train_images=48"):
        dn.train(noisy(40, build=normalised), out=tmp_path / "run", resume=True, calibration_images=20)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}


def test_killed_while_calibrating_anew_it_is_done_again(tmp_path):
    def progress(text):
        if text.startswith("measuring"):
            raise Killed

    dn.train(noisy(build=normalised), out=tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(Killed):
        dn.train(noisy(build=normalised), out=tmp_path / "run", resume=True, calibration_images=20, progress=progress)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    record = dn.train(noisy(build=normalised), out=tmp_path / "run", resume=True, calibration_images=20)
    assert record["settings"]["calibration_images"] == 20


def test_sizes_of_other_methods_are_not_calibrated_anew(tmp_path, monkeypatch):
    class Other(Plain):
        name, decomposes = "other", False

    monkeypatch.setitem(methods.METHODS, "other", Other())
    how = {"out": tmp_path / "run", "method": "other"}
    dn.train(noisy(build=normalised), **how)
    with refused("calibration_images", Saying("^calibration_images=20"), "the same, or another folder"):
        dn.train(noisy(build=normalised), **how, resume=True, calibration_images=20)


def test_weights_to_start_from_may_go_once_the_run_has_begun(tmp_path):
    torch.save(network().state_dict(), tmp_path / "weights.pt")

    def progress(text):
        (tmp_path / "weights.pt").unlink(missing_ok=True)

    record = dn.train(noisy(), out=tmp_path / "run", init=tmp_path / "weights.pt", progress=progress)
    assert record["init"]["file"] == "weights.pt"
    assert len(record["init"]["sha256"]) == 64


def test_two_runs_in_one_folder_are_refused(tmp_path):
    errors = []

    def progress(text):
        if not errors:
            try:
                dn.train(noisy(), out=tmp_path / "run", resume=True)
            except RunError as error:
                errors.append(error.what)

    dn.train(noisy(), out=tmp_path / "run", progress=progress)
    assert "another process is running in it" in errors[0]


@pytest.mark.parametrize(
    ("options", "option", "came", "allowed"),
    [
        ({"build": lambda: nn.Sequential(nn.Linear(5, 2))}, "model", (8, 6), ANY),
        ({"build": lambda: nn.Sequential(nn.Linear(6, 3))}, "network", "3 classes", "the same number"),
        (
            {"build": lambda: nn.Sequential(nn.Linear(6, 2), nn.Unflatten(1, (2, 1)))},
            "network",
            Saying(r"\(8, 2, 1\)"),
            ANY,
        ),
        ({"build": lambda: nn.LSTM(6, 2)}, "network", "tuple", Saying("^a tensor")),
        ({"build": lambda: nn.Sequential(nn.Flatten(), nn.Bilinear(6, 6, 2))}, "model", (8, 6), ANY),
        ({"count": 4}, "batch_size", 8, "an int from 1 to 4"),
    ],
)
def test_a_run_that_cannot_begin_leaves_nothing(tmp_path, options, option, came, allowed):
    with refused(option, came, allowed, kind=dn.DecomposableError):
        dn.train(noisy(**options), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_with_nothing_to_decompose_leaves_nothing(tmp_path):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6, 2))

        def forward(self, x):
            return x @ self.scale

    with refused("model", allowed=Saying("^at least one convolution"), kind=dn.DecomposableError):
        dn.train(noisy(build=Scale), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_label_that_is_no_class_is_named(tmp_path):
    class Wrong(Noisy):
        def __getitem__(self, index):
            return super().__getitem__(index)[0], 7

    def recipe():
        data = FromDatasets(classes=2, train=Wrong(16), test=Noisy(8))
        return dn.recipes.Task(build_model=network, load_data=lambda: data)

    with refused("data", 7, Saying("^0 to 1"), kind=DataError):
        dn.train(recipe, out=tmp_path / "run", batch_size=8)
    assert not (tmp_path / "run").exists()


def test_a_model_that_keeps_a_tensor_from_a_pass_can_be_trained(tmp_path):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.table = nn.Linear(6, 2), None

        def forward(self, x):
            if self.table is None:
                self.table = torch.linspace(0.5, 1, 6)
            return self.linear(x * self.table)

    assert dn.train(noisy(build=Keeps), out=tmp_path / "run", epochs=1)["steps"] == 6


def test_channels_last_with_kept_bases_is_resumed_exactly(tmp_path):
    class Pictures(Noisy):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x.repeat(12).view(2, 6, 6), y

    def build():
        return nn.Sequential(
            nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 2)
        )

    def recipe(settings: dn.recipes.Settings = replace(NOISY, channels_last=True, refresh=3, calibrated_sizes=(0.5,))):  # noqa: B008
        data = FromDatasets(classes=2, train=Pictures(48), test=Pictures(16))
        return dn.recipes.Task(build_model=build, load_data=lambda: data)

    dn.train(recipe, out=tmp_path / "whole")
    with pytest.raises(Killed):
        dn.train(recipe, out=tmp_path / "cut", checkpoint_seconds=0, progress=kill_at(5))
    dn.train(recipe, out=tmp_path / "cut", resume=True)
    networks = [(tmp_path / folder / "network.safetensors").read_bytes() for folder in ("whole", "cut")]
    assert networks[0] == networks[1]


def test_a_run_that_another_one_overtook_changes_nothing(tmp_path):
    job = experiment.prepare(noisy(), out=tmp_path / "run")  # nothing is there yet
    dn.train(noisy(), out=tmp_path / "run", seed=7)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    (tmp_path / "run" / "record.json").rename(tmp_path / "record.json")  # so that it does not look finished
    with refused(kind=RunError, what=Saying("^--out .*another process has just been running in it$")):
        experiment.run(job)
    (tmp_path / "record.json").rename(tmp_path / "run" / "record.json")
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}


@dataclass(frozen=True, kw_only=True)
class OwnNames(dn.recipes.Settings):
    train_images: int = 0
    init: str = "zeros"


def test_settings_may_have_the_names_of_other_parts_of_a_run(tmp_path):
    settings = OwnNames(epochs=1, batch_size=8, sizes=(1.0,))
    dn.train(noisy(settings=settings), out=tmp_path / "run")
    said = []
    dn.train(noisy(settings=settings), out=tmp_path / "run", resume=True, say=said.append)
    assert said == ["this run is complete; nothing to do"]


@dataclass(frozen=True, kw_only=True)
class WithPath(dn.recipes.Settings):
    extra: Path = Path("somewhere")


def test_settings_of_any_type_survive_a_kill(tmp_path):
    settings = WithPath(epochs=2, batch_size=8, sizes=(1.0,), extra=tmp_path)
    with pytest.raises(Killed):
        dn.train(noisy(settings=settings), out=tmp_path / "run", checkpoint_seconds=0, progress=kill_at(3))
    record = dn.train(noisy(settings=settings), out=tmp_path / "run", resume=True)
    assert record["settings"]["extra"] == str(tmp_path)
    assert from_plain(WithPath(), record["settings"]) == settings


def test_a_resumed_run_says_what_may_change_the_last_bits(tmp_path):
    with pytest.raises(Killed):
        dn.train(noisy(), out=tmp_path / "run", checkpoint_seconds=0, progress=kill_at(3))
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoint.pt", every_seconds=0)
    checkpoint = checkpoints.read()
    checkpoint["bits_depend_on"]["PyTorch"] = "1.0\x1b[2J"
    checkpoints.write(checkpoint)
    said = []
    dn.train(noisy(), out=tmp_path / "run", resume=True, say=said.append)
    assert f"begun with PyTorch 1.0\\x1b[2J, now {torch.__version__}" in said[1]


def _flip(path, place):
    content = bytearray(path.read_bytes())
    content[round(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def _claim_a_step(path, step):
    checkpoints = Checkpoints(path, every_seconds=0)
    state = checkpoints.read()
    state["position"]["step"] = step
    checkpoints.write(state)


SPOILT = {f"a bit at {place}": partial(_flip, place=place) for place in (0, 0.001, 0.01, 0.1, 0.3, 0.6, 0.9, 1)}
SPOILT |= {f"step={step}": partial(_claim_a_step, step=step) for step in (10**9, -1, 5)}


def test_resuming_from_a_checkpoint_that_was_changed_is_refused_and_changes_nothing(tmp_path):
    """A flipped bit went on without a word, and step=10**9 finished an untrained network."""
    out = tmp_path / "run"
    with pytest.raises(Killed):
        dn.train(noisy(), out=out, checkpoint_seconds=0, progress=kill_at(3))
    whole = (out / "checkpoint.pt").read_bytes()
    for kind, spoil in SPOILT.items():
        (out / "checkpoint.pt").write_bytes(whole)
        spoil(out / "checkpoint.pt")
        before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
        with refused(kind=CheckpointError, path=out / "checkpoint.pt"):
            dn.train(noisy(), out=out, resume=True)
        assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before, kind
    (out / "checkpoint.pt").write_bytes(whole)
    assert dn.train(noisy(), out=out, resume=True)["steps"] == 18


def test_weights_can_be_had_from_a_checkpoint(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(Killed):
        dn.train(noisy(), out=out, checkpoint_seconds=0, progress=kill_at(3))
    saved = Checkpoints(out / "checkpoint.pt", every_seconds=0).read()["model"]
    read = read_weights(out / "checkpoint.pt")
    assert list(read) == list(saved)
    assert all(torch.equal(read[name], saved[name]) for name in saved)
    assert dn.train(noisy(), out=tmp_path / "next", init=out / "checkpoint.pt", epochs=1)["init"]["sha256"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is asked for it")
def test_memory_of_tensors_that_are_gone_is_kept():
    program = """
import resource, sys, torch
from decomposable_edge.machine import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def step():
    held = [torch.ones(5 << 20) for _ in range(4)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step(); step()
before = faults()
for _ in range(5):
    step()
print(faults() - before)
"""
    command = [sys.executable, "-c", program]
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    default, kept = (int(run([*command, way]).stdout) for way in ("default", "keep"))
    assert kept <= default / 2 or default < 5 * 4 * 5 * 1024 / 2, "unless the C library keeps it anyway"
