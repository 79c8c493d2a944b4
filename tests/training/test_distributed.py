"""Runs that several processes of this machine share, as torchrun starts them, against one of a single process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import decomposable as dn
from decomposable.core.processes import ALONE
from decomposable.data.augment import Drawing, PadCropFlip, Standardise
from decomposable.data.base import TrainBatches
from decomposable.network.file.container import open_container
from decomposable.training.checkpoint import read_checkpoint
from decomposable.training.distributed import agreed, by_the_first, own_device, was_launched
from decomposable_edge.errors import InvalidArgumentError
from refusals import Saying, refused

SOURCE = Path(dn.__file__).parents[1]
LIMIT = 240  # seconds until a job that hangs is ended, and the test fails


def train(recipe, out, *more, count=1, verb="train", settings=(), **environment):
    """Run the command to its end, in so many processes; all of them are ended where it takes too long."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", count]
    start = [sys.executable, *(launcher if count > 1 else []), "-m", "decomposable"]
    sets = ["--set", *settings] if settings else []
    command = [*start, verb, f"shared_recipe:{recipe}", "--out", out, *more, *sets]
    path = os.pathsep.join([str(SOURCE), str(Path(__file__).parent)])
    process = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ended = threading.Timer(LIMIT, os.killpg, (process.pid, signal.SIGTERM))
    ended.start()
    try:
        process.out, process.err = process.communicate()
        assert ended.is_alive(), f"it took more than {LIMIT} s\n{process.err}"
    finally:
        ended.cancel()
    return process


def weights(folder):
    with open_container(folder / "network.safetensors") as container:
        return container.read_all()


def check_near(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.allclose(ours[name].double(), theirs[name].double(), atol=1e-5), name
    records = [json.loads((folder / "record.json").read_text()) for folder in (one, other)]
    assert records[0]["steps"] == records[1]["steps"]
    for a, b in zip(records[0]["epochs"], records[1]["epochs"], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["accuracy"] == b["accuracy"]
    return records


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    done = train("small", out)
    assert done.returncode == 0, done.err
    return out


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    out = tmp_path_factory.mktemp("shared") / "run"
    done = train("small", out, count=2)
    assert done.returncode == 0, done.err
    return out, done


def test_two_processes_train_the_network_of_one(alone, shared):
    out, done = shared
    _, record = check_near(alone, out)
    assert record["processes"] == 2
    assert {path.name for path in out.iterdir()} - {"tensorboard"} == {
        *("network.safetensors", "metrics.jsonl", "record.json", "curve.png")
    }
    assert done.err.count("in 2 processes") == 1
    assert done.err.count("epoch 2/2") == 1
    assert done.out.count("Every size is in one file") == 1
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["epoch", "epoch", "sizes"]


def test_a_process_that_is_killed_ends_the_job_with_a_message_and_the_run_goes_on(alone, shared, tmp_path):
    """With as many processes to the same bits, with one to what one would have had."""
    out, _ = shared
    killed = tmp_path / "killed"
    done = train("small", killed, "--checkpoint-seconds", 0, count=2, END_AT="1:9", END_BY="SIGKILL")
    assert done.returncode != 0
    assert (
        "decomposable train: error: the other processes cannot be reached, perhaps one of them was killed" in done.err
    )
    assert "--resume goes on from the last checkpoint" in done.err
    saved = read_checkpoint(killed / "checkpoint.pt")
    assert saved["position"]["step"] == 4  # of two passes each
    assert len(saved["random_of_others"]) == 1

    copy = tmp_path / "copy"
    shutil.copytree(killed, copy)
    again = train("small", killed, "--resume", count=2)
    assert again.returncode == 0, again.err
    assert again.err.count("resuming at step 4 of 12") == 1
    assert "the last bits may differ" not in again.err
    ours, theirs = weights(killed), weights(out)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    by_one = train("small", copy, "--resume")
    assert by_one.returncode == 0, by_one.err
    assert "(begun with processes 2, now 1: the last bits may differ)" in by_one.err
    check_near(alone, copy)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["elastic", "plain"])
def test_so_it_is_with_other_methods_and_four_processes(method, tmp_path):
    settings = [f"method={method}", "epochs=1", *(["elastic_turns=2"] if method == "elastic" else [])]
    for count, name in ((1, "one"), (4, "four")):
        done = train("bare", tmp_path / name, count=count, settings=settings)
        assert done.returncode == 0, done.err
    one, four = (json.loads((tmp_path / name / "record.json").read_text()) for name in ("one", "four"))
    for a, b in zip(one["epochs"], four["epochs"], strict=True):
        for key in a.keys() - {"seconds"}:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key


@pytest.mark.slow
def test_with_dropout_every_process_has_masks_of_its_own_and_goes_on_with_them(tmp_path):
    whole = train("dropped", tmp_path / "whole", count=2)
    assert whole.returncode == 0, whole.err
    out = tmp_path / "cut"
    cut = train("dropped", out, "--checkpoint-seconds", 0, count=2, END_AT="0:9", END_BY="SIGKILL")
    assert "process 1: the other processes cannot be reached" in cut.err
    first, (second,) = (read_checkpoint(out / "checkpoint.pt")[key] for key in ("random", "random_of_others"))
    assert first["torch"] != second["torch"]
    again = train("dropped", out, "--resume", count=2)
    assert again.returncode == 0, again.err
    ours, theirs = weights(out), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_who_is_asked_to_stop_stops_with_all_others_and_goes_on(tmp_path):
    out = tmp_path / "run"
    done = train("small", out, count=2, END_AT="1:9", END_BY="SIGTERM")
    assert done.returncode != 0
    assert done.err.count("decomposable train: stopped at step 5 of 12; --resume goes on from") == 1
    again = train("small", out, "--resume", count=4)
    assert again.returncode == 0, again.err
    assert json.loads((out / "record.json").read_text())["processes"] == 4


@pytest.mark.slow
def test_what_is_wrong_is_said_once(tmp_path):
    for count, settings, said in [
        (4, ["batch_size=3"], "batch_size=3; allowed: an int from 4, one image for each process,"),
        (2, ["epochs=0"], "epochs=0; allowed"),
    ]:
        done = train("small", tmp_path / "run", count=count, settings=settings)
        assert done.returncode != 0
        assert done.err.count("decomposable train: error: ") == 1
        assert done.err.count(said) == 1
        assert not (tmp_path / "run").exists()


def test_a_verb_that_processes_cannot_share_says_so_once(monkeypatch, capsys):
    from decomposable.commands.main import main

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, code in (("0", 2), ("1", 1)):
        monkeypatch.setenv("RANK", rank)
        assert main(["sizes", "network.safetensors"]) == code
    said = "decomposable sizes: error: torchrun: sizes is the work of one process; allowed with several: train\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_a_loss_that_fails_on_one_process_ends_all(tmp_path):
    done = train("broken", tmp_path / "run", count=2)
    assert done.returncode != 0
    assert "RuntimeError: out of luck" in done.err
    assert not (tmp_path / "run" / "record.json").exists()


def test_each_image_is_in_one_part_and_as_it_is_in_the_whole_batch():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("shared_recipe", Path(__file__).with_name("shared_recipe.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    how = {"batch_size": 25, "epochs": 1, "seed": 0}
    whole = TrainBatches(module._data(), **how)
    for count in (2, 3, 4, 25):
        parts = [TrainBatches(module._data(), **how, place=(i, count)) for i in range(count)]
        for number in range(len(whole)):
            x, y = (torch.cat(several) for several in zip(*(part[number] for part in parts), strict=True))
            assert torch.equal(x, whole[number][0])
            assert torch.equal(y, whole[number][1])
    with pytest.raises(InvalidArgumentError) as caught:
        TrainBatches(module._data(), **how, place=(0, 26))
    assert (caught.value.option, caught.value.came) == ("batch_size", 25)


def test_a_part_of_a_batch_is_augmented_as_in_the_whole():
    pixels = torch.randint(0, 256, (10, 3, 6, 6), dtype=torch.uint8)
    augment = PadCropFlip(Standardise((0.5,) * 3, (0.25,) * 3))
    whole = augment(pixels, torch.Generator().manual_seed(1))
    part = slice(3, 7)
    assert torch.equal(augment(pixels[part], Drawing(torch.Generator().manual_seed(1), 10, part)), whole[part])


def test_one_process_is_in_its_own_company(monkeypatch):
    assert agreed(ALONE, lambda: 3) == 3
    assert by_the_first(ALONE, threading.Event(), lambda: b"x") == b"x"
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert not was_launched()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert not was_launched()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert was_launched()


def test_every_process_has_a_device_of_its_own(monkeypatch):
    assert own_device("cpu") == "cpu"
    with refused("--device", "cuda:1", Saying("^auto, cpu or cuda")):
        own_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device("auto") == own_device("cuda") == "cuda:1"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with refused("--device", "auto", "--nproc-per-node of at most 2, or --device cpu"):
        own_device("auto")
