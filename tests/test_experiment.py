"""From a recipe to the files of a run, and killed on the way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import decomposable as dn
from decomposable import experiment, recipes
from decomposable.errors import InvalidArgumentError
from decomposable.evaluation import accuracy
from decomposable.metrics import read_metrics
from decomposable.recipes import small

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
SOURCE = Path(experiment.__file__).parents[1]
QUICK = ["epochs=3", "train_images=300", "calibration_images=100", "calibrated_sizes=0.3,0.5", "sizes=1,0.5,0.3"]


def command(out, *more, settings=QUICK):
    return [sys.executable, "-m", "decomposable", "train", "digits", "--out", str(out), *more, "--set", *settings]


def environment():
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


def run(out, *more, settings=QUICK):
    return subprocess.run(command(out, *more, settings=settings), capture_output=True, text=True, env=environment())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbs."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    result = run(out)
    assert result.returncode == 0, result.stderr
    return out, result


def test_a_run_leaves_its_files_and_nothing_else(whole):
    out, result = whole
    files = {path.name for path in out.iterdir()} - {"tensorboard"}
    assert files == {"network.safetensors", "metrics.jsonl", "record.json"}
    assert "test accuracy" in result.stdout
    assert "network.safetensors" in result.stdout


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


def test_nothing_in_the_artifact_is_a_pickle(whole):
    with safe_open(whole[0] / "network.safetensors", framework="pt") as file:
        assert len(list(file.keys())) > 10


@pytest.mark.parametrize(("method", "kills"), [("decomposable", 2), ("plain", 1)])
def test_a_run_killed_mid_epoch_ends_with_the_same_bits(tmp_path, method, kills):
    """SIGKILL gives a process no chance to tidy up. The network is compared byte by byte."""
    settings = [*QUICK, f"method={method}", "refresh=4"]
    assert run(tmp_path / "whole", settings=settings).returncode == 0
    out = tmp_path / "killed"
    for k in range(kills):
        process = subprocess.Popen(
            command(out, "--resume", "--checkpoint-seconds", "0", settings=settings),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(),
        )
        _wait_for_step(out, 2 + 6 * k, process)  # six steps are an epoch
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (out / "record.json").exists()
    checkpoint = torch.load(out / "checkpoint.pt", weights_only=True)
    assert 0 < checkpoint["position"]["step"] < 18
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
        try:
            if torch.load(out / "checkpoint.pt", weights_only=True)["position"]["step"] >= step:
                return
        except OSError:
            pass
        time.sleep(0.01)
    pytest.fail("no checkpoint within a minute")


def _tensors(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _without_times(lines):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


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
    assert process.returncode == 1
    last = err.rstrip().split("\n")[-1]
    assert "stopped at step" in last
    assert "--resume" in last


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
    assert result.returncode == 1
    assert "balance=0.5, now it is 0.3" in result.stderr
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


def test_training_from_the_artifact_of_another_run(tmp_path, whole):
    result = run(tmp_path / "next", "--init", str(whole[0] / "network.safetensors"), settings=[*QUICK, "epochs=1"])
    assert result.returncode == 0, result.stderr
    record = json.loads((tmp_path / "next" / "record.json").read_text())
    assert record["init"]["file"] == "network.safetensors"
    first = json.loads((whole[0] / "record.json").read_text())
    assert record["epochs"][0]["loss"] < first["epochs"][0]["loss"]


def test_from_python_with_a_function_of_ones_own(tmp_path):
    def mine(settings: dn.Settings = dn.Settings(epochs=1, batch_size=50, calibrated_sizes=(0.5,), sizes=(0.5,))):  # noqa: B008
        return recipes.find("digits")(small.DigitsSettings(train_images=200))

    record = dn.train(mine, out=tmp_path / "run", learning_rate=0.05)
    assert record["settings"]["learning_rate"] == 0.05
    assert record["steps"] == 4
    with pytest.raises(InvalidArgumentError, match="did you mean learning_rate"):
        dn.train(mine, out=tmp_path / "other", learning_rat=0.05)
    assert not (tmp_path / "other").exists()
