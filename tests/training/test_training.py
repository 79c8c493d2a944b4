"""The loop by itself: what is logged, when it stops, and that it goes on exactly where it was."""

import json
import math
import os
import random
import signal
import sys
import threading
import types
from dataclasses import replace
from io import FileIO

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decomposable.data.base import Images, InMemory, TrainBatches
from decomposable.recipes.settings import Settings
from decomposable.training import methods
from decomposable.training.checkpoint import CheckpointError, Checkpoints, position_in
from decomposable.training.devices import random_state, seed_everything, set_random_state
from decomposable.training.divergence import DivergedError
from decomposable.training.loop import (
    Watchers,
    as_duration,
    parameter_groups,
    rate_factor,
    train,
)
from decomposable.training.metrics import MetricsLog, read_metrics
from decomposable.training.runs import check_same_run
from decomposable_edge.interrupts import Interrupted, stop_signals
from refusals import Saying, refused

SETTINGS = Settings(epochs=2, batch_size=10, ratio=(0.2, 0.6), learning_rate=0.05, schedule="cosine")


def jitter(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def keep(x):
    return x


def data(count=60):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 1, 6, 6, generator=generator)
    y = (x.mean(dim=(1, 2, 3)) > 0).long()
    return InMemory(classes=2, train=Images(x, y), test=Images(x, y), augment=jitter, prepare=keep)


def build(seed=0):
    seed_everything(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 2),
    )


def cross_entropy(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


class Run:
    """A training in a folder; `loss` may do harm at some step."""

    def __init__(self, folder, settings=SETTINGS, every_seconds=0.0, loss=cross_entropy, identity="a"):
        self.folder, self.settings, self.every_seconds = folder, settings, every_seconds
        self.loss, self.identity = loss, {"name": identity, **vars(settings)}
        self.lines, self.progress = [], []

    def __call__(self):
        model = build(self.settings.seed)
        batches = TrainBatches(data(), batch_size=self.settings.batch_size, epochs=self.settings.epochs, seed=1)
        checkpoints = Checkpoints(self.folder / "checkpoint.pt", every_seconds=self.every_seconds)
        saved = checkpoints.read()
        if saved is not None:
            check_same_run(checkpoints.path, saved["run"], self.identity)
        step = position_in(saved, checkpoints.path, batches).step if saved else 0
        with stop_signals() as stop, MetricsLog(self.folder / "metrics.jsonl", after_step=step) as log:
            self.position = train(
                model,
                batches,
                methods.find(self.settings.method).step(model, self.settings),
                self.settings,
                loss=self.loss,
                evaluate=lambda net: 50.0,
                checkpoints=checkpoints,
                saved=saved,
                watchers=Watchers(log=log, progress=self.progress.append, say=self.lines.append),
                stop=stop,
                identity=self.identity,
                peak_learning_rate=self.settings.learning_rate,
            )
        return model


def harm_at(step, do):
    calls = []

    def loss(net, batch):
        calls.append(net)
        if len(calls) == step:
            do()
        return cross_entropy(net, batch)

    return loss


class Killed(BaseException):
    """As abrupt as it gets inside a process."""


def kill():
    raise Killed


@pytest.mark.parametrize(
    ("method", "refresh", "call"),  # the loss is called twice in a step, but once in plain training; there are 12 steps
    [*((m, r, c) for m, r in [("decomposable", 1), ("decomposable", 3)] for c in (1, 2, 7, 13, 22)), ("plain", 1, 8)],
)
def test_a_run_that_is_cut_off_anywhere_ends_with_the_same_bits(tmp_path, method, refresh, call):
    settings = replace(SETTINGS, method=method, refresh=refresh)
    whole = Run(tmp_path / "whole", settings)
    expected = whole()
    (tmp_path / "cut").mkdir()
    with pytest.raises(Killed):
        Run(tmp_path / "cut", settings, loss=harm_at(call, kill))()
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002  whatever happens to the generators meanwhile
    resumed = Run(tmp_path / "cut", settings)()
    for name, value in expected.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    logs = [_without_times(read_metrics(tmp_path / folder / "metrics.jsonl")) for folder in ("whole", "cut")]
    assert logs[0] == logs[1]


def _without_times(lines):
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def test_checkpoints_hold_everything_even_between_writes(tmp_path):
    """Killed long after the last checkpoint: the steps since then are made again."""
    expected = Run(tmp_path / "whole")()
    run = Run(tmp_path / "cut", every_seconds=1e9, loss=harm_at(9, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(Interrupted, match=r"stopped at step 5 of 12; --resume"):
        run()
    with pytest.raises(Killed):
        Run(tmp_path / "cut", every_seconds=1e9, loss=harm_at(6, kill))()
    resumed = Run(tmp_path / "cut")()
    assert all(
        torch.equal(a, b) for a, b in zip(expected.state_dict().values(), resumed.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_writes_a_checkpoint(tmp_path, number):
    before = signal.getsignal(number)
    run = Run(tmp_path, every_seconds=1e9, loss=harm_at(3, lambda: os.kill(os.getpid(), number)))
    with pytest.raises(Interrupted, match="step 2 of 12"):
        run()
    assert Checkpoints(tmp_path / "checkpoint.pt", every_seconds=0).read()["position"]["step"] == 2
    assert signal.getsignal(number) is before


def test_a_second_signal_stops_at_once(tmp_path):
    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        Run(tmp_path, loss=harm_at(3, twice))()


def test_it_learns_and_says_so(tmp_path):
    run = Run(tmp_path, replace(SETTINGS, epochs=12))
    run()
    epochs = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "epoch"]
    assert [line["epoch"] for line in epochs] == list(range(1, 13))
    assert epochs[-1]["loss"] < 0.6 * epochs[0]["loss"]
    assert {"loss", "loss_low", "ratio", "gradient_norm", "accuracy", "seconds", "step"} <= epochs[0].keys()
    steps = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [50]
    assert steps[0]["learning_rate"] == pytest.approx(0.05 * rate_factor(run.settings, 49, 6))
    assert len(run.lines) == 12
    assert "epoch  1/12" in run.lines[0]
    assert "test accuracy 50.00%" in run.lines[0]
    assert "steps/s" in run.progress[0]
    assert "left" in run.progress[0]


def test_plain_training_is_torchs_own(tmp_path):
    """The loop adds nothing: the same steps by hand end with the same weights."""
    settings = replace(SETTINGS, method="plain", schedule="constant", weight_decay=0.01, nesterov=True)
    trained = Run(tmp_path, settings)()
    model = build(settings.seed)
    kernels = [model[0].weight, model[4].weight, model[7].weight]
    others = [model[1].weight, model[1].bias, model[4].bias, model[7].bias]
    optimizer = torch.optim.SGD(
        [{"params": kernels, "weight_decay": 0.01}, {"params": others}], lr=0.05, momentum=0.9, nesterov=True
    )
    batches = TrainBatches(data(), batch_size=10, epochs=2, seed=1)
    model.train()
    for i in range(12):
        optimizer.zero_grad()
        cross_entropy(model, batches[i]).backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name


def test_weight_decay_is_for_kernels_only():
    model = nn.ModuleDict(
        {
            "conv": nn.Conv2d(1, 2, 3),
            "transposed": nn.ConvTranspose1d(1, 2, 3),
            "norm": nn.BatchNorm2d(2),
            "linear": nn.Linear(2, 2),
            "attention": nn.MultiheadAttention(4, 2),
            "embedding": nn.Embedding(3, 4),
            "prelu": nn.PReLU(),
        }
    )
    decayed, others = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    kernels = {"conv.weight", "transposed.weight", "linear.weight", "attention.in_proj_weight"}
    assert {names[id(p)] for p in decayed["params"]} == kernels | {"attention.out_proj.weight"}
    assert len(decayed["params"]) + len(others["params"]) == len(names)


def test_the_rate_follows_the_papers_steps():
    settings = Settings()  # 200 epochs
    assert rate_factor(replace(settings, epochs=1), 0, 390) == 1  # parts of the training, not whole epochs
    epochs = {0: 1.0, 59: 1.0, 60: 0.2, 119: 0.2, 120: 0.04, 159: 0.04, 160: 0.008, 199: 0.008}
    for epoch, factor in epochs.items():
        assert rate_factor(settings, epoch * 390, 390) == pytest.approx(factor)
        assert rate_factor(settings, epoch * 390 + 389, 390) == pytest.approx(factor)


def test_the_rate_warms_up_and_falls_as_a_cosine():
    settings = Settings(epochs=11, schedule="cosine", warmup_epochs=1.0)
    factors = [rate_factor(settings, step, 100) for step in range(1100)]
    assert factors[0] == pytest.approx(1 / 101)
    assert factors[100] == 1
    assert factors[600] == pytest.approx(0.5)
    assert factors[:101] == sorted(factors[:101])
    assert factors[100:] == sorted(factors[100:], reverse=True)
    assert 0 < factors[-1] < 1e-4
    assert {rate_factor(replace(settings, schedule="constant", warmup_epochs=0.0), s, 100) for s in (0, 500)} == {1.0}


@pytest.mark.parametrize("schedule", ["cosine", "polynomial", "steps"])
def test_a_rate_that_is_steady_at_first_has_its_whole_schedule_afterwards(schedule):
    settings = Settings(epochs=10, schedule=schedule)
    usual = [rate_factor(settings, step, 100) for step in range(1000)]
    steady = [rate_factor(settings, step, 100, steady=0.5) for step in range(1000)]
    assert set(steady[:500]) == {1.0}
    assert steady[500:] == pytest.approx(usual[::2])


def test_a_nan_in_a_layer_is_named_with_step_and_checkpoint(tmp_path):
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x - 1e6)

    def build_bad():
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 4), Root(), nn.Linear(4, 2))

    model = build_bad()
    settings = replace(SETTINGS, method="plain")
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", every_seconds=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        MetricsLog(tmp_path / "metrics.jsonl", after_step=0) as log,
        refused(came=Saying("^the loss is nan, .*layer '2'$"), kind=DivergedError, step=1, checkpoint=None),
    ):
        train(
            model,
            TrainBatches(data(), batch_size=10, epochs=1, seed=1),
            methods.find(settings.method).step(model, settings),
            settings,
            loss=cross_entropy,
            evaluate=lambda net: 0.0,
            checkpoints=checkpoints,
            saved=None,
            watchers=Watchers(log=log),
            stop=threading.Event(),
            identity={},
            peak_learning_rate=0.1,
        )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def spoil_low_rank(step):
    calls = []

    def loss(net, batch):
        calls.append(net)
        value = cross_entropy(net, batch)
        return value * math.nan if len(calls) == step else value

    return loss


def test_a_nan_in_the_low_rank_loss_keeps_the_last_good_checkpoint(tmp_path):
    came, kept = Saying("^the low-rank loss is nan, in the loss itself"), tmp_path / "checkpoint.pt"
    with refused(came=came, kind=DivergedError, step=3, checkpoint=kept) as caught:
        Run(tmp_path, loss=spoil_low_rank(6))()
    assert str(kept) in str(caught.value)
    saved = Checkpoints(tmp_path / "checkpoint.pt", every_seconds=0).read()
    assert saved["position"]["step"] == 2
    assert all(value.isfinite().all() for value in saved["model"].values())


def test_an_infinite_gradient_stops_before_the_weights_are_spoilt(tmp_path):
    def steep(net, batch):
        return (net(batch[0]).sum() * 0).abs().sqrt()  # finite, with a slope that is not

    with refused(came=Saying("^the gradient's norm is nan, .*'0.weight'$"), kind=DivergedError, step=1):
        Run(tmp_path, replace(SETTINGS, method="plain"), loss=steep)()


@pytest.mark.parametrize("method", ["decomposable", "plain"])
def test_weights_that_an_update_spoils_are_never_kept(tmp_path, method):
    """The gradient is finite, the step it leads to is not."""
    settings = replace(SETTINGS, method=method, learning_rate=3e38, weight_decay=10.0, schedule="constant")
    with refused(came=Saying("the weight '0.weight'"), kind=DivergedError, step=1, checkpoint=None):
        Run(tmp_path, settings)()
    assert not (tmp_path / "checkpoint.pt").exists()
    with refused(kind=DivergedError, step=2, checkpoint=None) as caught:  # no checkpoint looks at the weights first
        Run(tmp_path, settings, every_seconds=1e9)()
    assert "there is no checkpoint yet" in str(caught.value)


def test_a_bad_batch_is_named(tmp_path):
    def loss(net, batch):
        batch[0][0] = math.inf
        return cross_entropy(net, batch)

    with refused(came=Saying("already in the batch$"), kind=DivergedError):
        Run(tmp_path, replace(SETTINGS, method="plain"), loss=loss)()


def test_the_gradient_is_clipped(tmp_path):
    run = Run(tmp_path, replace(SETTINGS, method="plain", clip_norm=1e-9, weight_decay=0.0))
    trained, initial = run(), build(0)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(trained.parameters(), initial.parameters(), strict=True))


def test_bfloat16_and_channels_last_train_as_well(tmp_path):
    for name, changes in (("a", {"precision": "bfloat16"}), ("b", {"channels_last": True})):
        Run(tmp_path / name, replace(SETTINGS, **changes))()
        epochs = [line for line in read_metrics(tmp_path / name / "metrics.jsonl") if line["kind"] == "epoch"]
        assert math.isfinite(epochs[-1]["loss_low"])


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    Run(tmp_path, loss=cross_entropy)()
    other = Run(tmp_path, identity="b")
    with refused("name", "b", "name=a"):
        other()


def test_a_checkpoint_with_parts_missing_is_one_clear_line(tmp_path):
    Checkpoints(tmp_path / "checkpoint.pt", every_seconds=0).write({"run": {}})
    with refused(kind=CheckpointError, path=tmp_path / "checkpoint.pt", reason=Saying("it has no position$")):
        Run(tmp_path)()


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04 cut", b"words of text\n", bytes(8), b"\xff" * 99])
def test_a_damaged_checkpoint_is_one_clear_line(tmp_path, content):
    (tmp_path / "checkpoint.pt").write_bytes(content)
    with refused(kind=CheckpointError, path=tmp_path / "checkpoint.pt", reason=Saying("^it is no checkpoint")):
        Run(tmp_path)()
    assert (tmp_path / "checkpoint.pt").read_bytes() == content


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A real one, in the middle of an epoch, with momentum, kept bases and dropout."""
    folder = tmp_path_factory.mktemp("cut")
    with pytest.raises(Killed):
        Run(folder, replace(SETTINGS, refresh=3), loss=harm_at(9, kill))()
    return folder / "checkpoint.pt"


def test_a_bit_that_is_flipped_anywhere_in_a_checkpoint_is_refused_in_one_line(checkpoint, tmp_path):
    content, path = checkpoint.read_bytes(), tmp_path / "checkpoint.pt"
    chance = random.Random(0)
    places = [*range(64), *(chance.randrange(len(content)) for _ in range(400)), len(content) - 1]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with refused(kind=CheckpointError, path=path, reason=Saying("^it is no checkpoint")):
            Checkpoints(path, every_seconds=0).read()


def test_a_checkpoint_that_was_cut_short_or_has_more_behind_it_is_refused(checkpoint, tmp_path):
    content, path = checkpoint.read_bytes(), tmp_path / "checkpoint.pt"
    for changed in [*(content[: round(part * len(content) / 20)] for part in range(20)), content[:-1], content + b"\0"]:
        path.write_bytes(changed)
        with pytest.raises(CheckpointError):
            Checkpoints(path, every_seconds=0).read()


def claim(*path_and_value):
    """Another value somewhere in what a checkpoint says."""
    *path, last, value = path_and_value

    def change(state):
        for key in path:
            state = state[key]
        state[last] = value

    change.__name__ = "/".join(map(str, [*path, last])) + f"={value!r:.30}"
    return change


def without(*path):
    def change(state):
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    change.__name__ = f"without {'/'.join(map(str, path))}"
    return change


CLAIMS = [
    claim("position", "step", 10**9), claim("position", "step", 13), claim("position", "step", -1),
    claim("position", "step", 3), claim("position", "step", 4.0), claim("position", "step", True),
    claim("position", "step", "4"), claim("position", "count", 10**9), claim("position", "count", 0),
    claim("position", "seconds", math.nan), claim("position", "seconds", -1.0), claim("position", "seconds", None),
    claim("position", "sums", {"loss": math.inf}), claim("position", "sums", {"loss": "x"}),
    claim("position", "sums", []), claim("position", "commits", [1]), claim("position", "commits", ["x"] * 2000),
    claim("position", {}), without("position", "step"), claim("model", {}), without("model", "0.weight"),
    claim("model", "0.weight", torch.zeros(8, 1, 3, 4)), claim("model", "0.weight", torch.zeros(8, 1, 3, 3).double()),
    claim("model", "0.weight", torch.full((8, 1, 3, 3), math.nan)), claim("model", "0.weight", 3),
    claim("model", "extra", torch.zeros(1)), claim("optimizer", {}), claim("optimizer", "state", []),
    claim("optimizer", "state", {99: {"momentum_buffer": torch.zeros(1)}}),
    claim("optimizer", "state", 0, "momentum_buffer", torch.zeros(1)), claim("optimizer", "state", 0, {}),
    claim("optimizer", "param_groups", []), claim("optimizer", "param_groups", 0, "weight_decay", 1.0),
    claim("optimizer", "param_groups", 0, "momentum", 0.0), claim("optimizer", "param_groups", 0, "maximize", True),
    claim("optimizer", "param_groups", 0, "params", [0]), claim("optimizer", "param_groups", 0, "lr", math.nan),
    claim("method", {}), claim("method", "generator", torch.zeros(3, dtype=torch.uint8)),
    claim("method", "bases", "age", 10**9), claim("method", "bases", "projected", ["nobody"]),
    claim("method", "bases", "layers", "0", "u", torch.zeros(5, 5)),
    claim("method", "bases", "layers", {"nobody": {}}), claim("random", {}), claim("random", "torch", "00" * 3),
    claim("random", "numpy", ["MT19937", "00" * 4 * 624, 10**6, 0, 0.0]),
    claim("random", "python", [3, "00" * 4 * 624 + "ffffffff", None]),
]  # fmt: skip


@pytest.mark.parametrize("change", CLAIMS, ids=lambda change: change.__name__)
def test_what_a_checkpoint_says_is_checked_and_nothing_is_trained_or_written(checkpoint, tmp_path, change):
    """With checksums that are right: somebody wrote it so."""
    state, path = Checkpoints(checkpoint, every_seconds=0).read(), tmp_path / "checkpoint.pt"
    change(state)
    Checkpoints(path, every_seconds=0).write(state)
    before = path.read_bytes()
    run = Run(tmp_path, replace(SETTINGS, refresh=3))
    with refused(kind=CheckpointError, path=path, reason=Saying("^it does not fit this run: .")):
        run()
    assert [run.progress, [p.name for p in tmp_path.iterdir()], path.read_bytes()] == [[], ["checkpoint.pt"], before]


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"format": 1, "x": Attack()}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError):
        Run(tmp_path)()
    assert not (tmp_path / "owned").exists()


def test_writing_a_checkpoint_is_all_or_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", every_seconds=0)
    whole = {key: {} for key in ("run", "position", "model", "optimizer", "method", "bits_depend_on")}
    checkpoints.write({**whole, "a": 1})

    def fail(file, content):
        raise OSError("No space left on device")

    monkeypatch.setattr("decomposable_edge.file.container.FileIO", type("FileIO", (FileIO,), {"write": fail}))
    with refused(kind=CheckpointError, path=tmp_path / "checkpoint.pt", reason=Saying("^it cannot be written")):
        checkpoints.write({**whole, "a": 2})
    monkeypatch.undo()
    assert checkpoints.read()["a"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_any_value_that_a_state_may_hold_comes_back(tmp_path):
    """Layouts too: the last bits of a sum may depend on them."""
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    extra = {1: (weight, [None, True, -3, 0.1, math.inf]), "z": torch.randn(3, dtype=torch.complex64), "e": {}}
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", every_seconds=0)
    checkpoints.write(
        {**{key: {} for key in ("run", "position", "model", "optimizer", "bits_depend_on")}, "method": extra}
    )
    again = checkpoints.read()["method"]
    assert again[1][0].stride() == weight.stride()
    assert torch.equal(again[1][0], weight)
    assert again[1][1] == extra[1][1]
    assert torch.equal(again["z"], extra["z"])
    assert list(again) == [1, "z", "e"]
    with refused("checkpoint", "method/x"):
        checkpoints.write({"method": {"x": {1}}})


def test_all_global_generators_are_restored():
    seed_everything(3)
    random.gauss(0, 1)  # leaves a second value behind
    state = json.loads(json.dumps(random_state()))  # as it goes from process to process, and into a checkpoint
    first = (random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(1).item())  # noqa: NPY002
    seed_everything(4)
    set_random_state(state)
    assert first == (random.gauss(0, 1), random.random(), np.random.randn(), torch.rand(1).item())  # noqa: NPY002


def test_metrics_survive_a_torn_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n{"kind": "step", "step": 2}\n{"kind": "st')
    with MetricsLog(path, after_step=1) as log:
        log.write("step", 2, {"loss": 0.5})
        assert path.read_text().count("\n") == 2  # flushed line by line
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    assert read_metrics(path)[1]["loss"] == 0.5


def test_damaged_lines_of_metrics_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1}\n\xff\xfe\n{"step": "x"}\n[1]\n{}\n')
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_durations_read_well():
    assert [as_duration(s) for s in (3, 99, 600, 7200, 90061)] == ["3 s", "99 s", "10 min", "2 h 0 min", "25 h 1 min"]


def test_tensorboard_gets_the_same_numbers_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Run(tmp_path)()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    epochs = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "epoch"]
    assert [(s.step, s.value) for s in board.Scalars("epoch/loss")] == [
        (line["step"], pytest.approx(line["loss"])) for line in epochs
    ]


def test_numbers_go_to_the_board_under_their_kind(tmp_path, monkeypatch):
    """Without TensorBoard: what the log hands to a writer, and that a resumed run says where it goes on."""
    made, scalars = [], []

    class Writer:
        def __init__(self, folder, purge_step):
            made.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            scalars.append((name, value, step))

        def close(self):
            made.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with MetricsLog(tmp_path / "metrics.jsonl", after_step=7) as log:
        log.write("epoch", 8, {"loss": 0.5, "text": "no number"})
    assert made == [(str(tmp_path / "tensorboard"), 8), "closed"]
    assert scalars == [("epoch/loss", 0.5, 8)]
