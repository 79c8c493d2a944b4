"""Measuring, with times that follow from the plans where the outcome matters, and with real ones where the way does."""

import contextlib
import functools
import json

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.export.measuring import measure, runners
from decomposable.network.calls import CallSignature, InputSpec
from decomposable_edge.errors import BudgetError, InvalidArgumentError
from decomposable_edge.sizing import sweep as sweeping
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.sweep import SIZES, interleaved, sweep

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation still has")
IMAGE = (1, 8, 8)


def small_net(example_input=True):
    torch.manual_seed(0)
    model = models.small_cnn().eval()
    return dn.decompose(model, example_input=torch.zeros(1, *IMAGE) if example_input else None)


@pytest.fixture(scope="module")
def net():
    return small_net()


# Which sizes are timed


@pytest.fixture
def timed_by(monkeypatch):
    """Sweeps whose times are what a function says of the plan."""

    def timed_by(seconds):
        now, made = [0.0], []

        @contextlib.contextmanager
        def making(plans):
            made.append(dict(plans))

            def run(plan):
                now[0] += seconds(plan)

            yield {name: functools.partial(run, plan) for name, plan in plans.items()}

        monkeypatch.setattr(sweeping, "interleaved", functools.partial(interleaved, clock=lambda: now[0]))
        return making, made

    return timed_by


SETTING = {"runtime": "torch", "batch": 2, "threads": 3, "seconds": 0.0}


def test_the_original_and_the_sizes_are_timed_in_one_go(net, timed_by):
    making, made = timed_by(lambda plan: 1e-9 * plan.macs)
    entry = sweep(net.selector, making, [0.5, 0.25, 1.0, 0.5], **SETTING)
    plans = [net.plan(macs=size) for size in (0.25, 0.5, 1.0)]
    assert [list(each.values()) for each in made] == [[net.selector.full_plan(), plans[1], plans[0]]]
    assert entry.setting == ("torch", 2, 3)
    assert (entry.align, entry.trials) == ("auto", ())
    for timed, plan in zip(entry.sizes, plans, strict=True):
        assert (timed.macs, timed.macs_fraction, timed.params) == (plan.macs, plan.macs_fraction, plan.params)
        assert timed.params_fraction == plan.params_fraction
        assert (timed.low_ms, timed.median_ms, timed.high_ms) == pytest.approx((1e-6 * plan.macs,) * 3)
        assert timed.repetitions == 5
        assert net.selector.of_size(timed.size) == plan


def test_the_usual_sizes_are_those_that_are_possible(timed_by):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    net = dn.decompose(model, torch.zeros(1, 30), min_rank=5)  # 2 · 5 · 60 of 1800 MACs: 0.33
    making, _ = timed_by(lambda plan: plan.macs)
    entry = sweep(net.selector, making, None, **SETTING)
    assert [round(timed.size, 2) for timed in entry.sizes] == [0.33, 0.5, 0.73, 0.83, 0.93, 1.0]
    with pytest.raises(BudgetError, match=r"0\.1 is too small"):
        sweep(net.selector, making, [0.1], **SETTING)
    assert (min(SIZES), max(SIZES)) == (0.1, 0.95)


def test_aligned_sizes_are_timed(net, timed_by):
    making, made = timed_by(lambda plan: plan.macs)
    entry = sweep(net.selector, making, [0.5], **SETTING, align=4)
    assert made[0]["0.5"] == net.plan(macs=0.5, align=4)
    assert entry.align == 4
    assert entry.trials == ()


@pytest.mark.parametrize("beyond", [1, 2, 10**30])
def test_an_alignment_above_all_ranks_is_stored_as_the_smallest_such(net, timed_by, beyond, tmp_path):
    making, made = timed_by(lambda plan: plan.macs)
    most = max(cost.full_rank for cost in net.selector.costs)
    entry = sweep(net.selector, making, [0.5], **SETTING, align=most + beyond)
    assert entry.align == most + 1
    assert made[0]["0.5"] == net.plan(macs=0.5, align=most + beyond)
    LatencyProfile.of(net.selector, [entry]).save(tmp_path / "p.json")
    assert LatencyProfile.load(tmp_path / "p.json").entries == (entry,)


def steps_of(width):
    """A machine that works in steps: it takes as long for one basis as for the whole step that it begins."""

    def seconds(plan):
        return sum(-(-rank // width) * width for name, rank in plan.ranks.items() if name not in plan.dense)

    return seconds


@pytest.mark.parametrize("width", [4, 8])
def test_the_alignment_that_the_machine_likes_is_found(width, timed_by):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    net = dn.decompose(model, torch.zeros(1, 128))
    making, made = timed_by(steps_of(width))
    entry = sweep(net.selector, making, [0.5, 0.4, 0.3, 1.0], **SETTING, align="measured")
    assert entry.align == width
    trials = dict(entry.trials)
    assert trials[1] == 1.0
    assert trials[width] == min(trials.values()) < 0.99
    expected = np.sqrt(
        np.prod(
            [
                (steps_of(width)(aligned) / aligned.macs) / (steps_of(width)(plain) / plain.macs)
                for size in (0.5, 0.3)
                for aligned in [net.plan(macs=size, align=width)]
                for plain in [net.plan(macs=size)]
            ]
        )
    )
    assert trials[width] == pytest.approx(expected)
    assert list(made[1].values())[1:] == [net.plan(macs=size, align=width) for size in (0.5, 0.4, 0.3)]


def test_an_alignment_is_not_better_for_leaving_budget_unused(net, timed_by):
    making, _ = timed_by(lambda plan: plan.macs)
    entry = sweep(net.selector, making, [0.6, 0.3], **SETTING, align="measured")
    assert entry.align == 1
    assert dict(entry.trials) == pytest.approx(dict.fromkeys(dict(entry.trials), 1.0))
    assert len(entry.trials) > 1


def test_auto_is_one_of_the_alignments_that_are_tried(timed_by):
    """Of those that are as good as equal it comes second: it moves ranks less than any multiple."""
    torch.manual_seed(0)
    net = dn.decompose(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))), torch.zeros(1, 512))
    making, made = timed_by(lambda plan: plan.macs * (1.0 if plan.align == 1 else 0.8))
    entry = sweep(net.selector, making, [0.5, 0.3], **SETTING, align="measured")
    assert [align for align, _ in entry.trials] == [1, "auto", 4, 8, 16, 32]
    assert entry.align == "auto"
    assert made[-1]["0.5"].ranks == net.plan(macs=0.5, align="auto").ranks


def test_sizes_rounded_by_auto_are_timed(net, timed_by):
    making, made = timed_by(lambda plan: plan.macs)
    entry = sweep(net.selector, making, [0.5], **SETTING, align="auto")
    assert made[0]["0.5"] == net.plan(macs=0.5, align="auto")
    assert entry.align == "auto"


def test_alignments_that_one_of_the_sizes_cannot_have_are_not_tried(net, timed_by):
    making, _ = timed_by(lambda plan: plan.macs)
    entry = sweep(net.selector, making, [0.6, net.selector.smallest_size], **SETTING, align="measured")
    assert [align for align, _ in entry.trials] == [1, "auto"]  # which can have all that unrounded ranks can
    with pytest.raises(InvalidArgumentError, match="needs a size below 1"):
        sweep(net.selector, making, [1.0], **SETTING, align="measured")


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch": 0},
        {"threads": 0},
        {"threads": 1.5},
        {"threads": 100_000},
        {"runtime": "tf"},
        {"align": 0},
        {"align": "best"},
    ],
)
def test_a_wrong_setting_is_refused(net, wrong, timed_by):
    making, made = timed_by(lambda plan: plan.macs)
    name = next(iter(wrong))
    with pytest.raises(InvalidArgumentError, match=rf"{name}=.*; allowed"):
        sweep(net.selector, making, [0.5], **{**SETTING, **wrong})
    assert made == []


# Running


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_runs_are_the_networks_themselves(runtime):
    if runtime == "onnxruntime":
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()
    model[1].running_var.uniform_(0.5, 2)
    net = dn.decompose(model, torch.zeros(1, *IMAGE))
    x = net.input.example(3)
    plans = {"dense": net.selector.full_plan(), "small": net.plan(macs=0.3)}
    modules = {name: net.extract(plan) for name, plan in plans.items()}
    with torch.no_grad():
        expected = {name: module(x).numpy() for name, module in modules.items()}
    with runners(runtime, modules, net.call, batch=3, threads=1) as runs:
        found = {name: run() for name, run in runs.items()}
    for name, y in found.items():
        y = y.numpy() if runtime == "torch" else y[0]
        np.testing.assert_allclose(y, expected[name], atol=1e-5)
    assert not np.allclose(expected["dense"], expected["small"], atol=1e-3)


class Asking(nn.Module):
    """Notes how it is run."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(8, 8), []

    def forward(self, x):
        self.seen.append((len(x), torch.get_num_threads(), torch.is_inference_mode_enabled(), self.training))
        return self.linear(x)


def test_torch_runs_in_inference_mode_on_so_many_threads_which_are_given_back():
    before, module = torch.get_num_threads(), Asking().train()
    call = CallSignature.with_first(InputSpec(shape=(8,), dtype="float32"))
    with runners("torch", {"a": module}, call, batch=5, threads=before + 1) as runs:
        runs["a"]()
    assert module.seen == [(5, before + 1, True, False)] * 2  # once to see whether it runs
    assert torch.get_num_threads() == before
    with (
        pytest.raises(ZeroDivisionError),
        runners("torch", {"a": module}, call, batch=5, threads=before + 1),
    ):
        raise ZeroDivisionError
    assert torch.get_num_threads() == before
    assert not torch.is_inference_mode_enabled()


IMPOSSIBLE = {
    "dimensions": ({"input": InputSpec(shape=(3, 8), dtype="float32")}, r"batch=1 of 3x8 \(float32\)"),
    "channels": ({"input": InputSpec(shape=(5, 8, 8), dtype="float32")}, "batch=1 of 5x8x8"),
    "dtype": ({"input": InputSpec(shape=IMAGE, dtype="int64")}, "int64"),
    "memory": ({"batch": 1 << 45}, f"batch={1 << 45}"),
    "overflow": ({"batch": 1 << 61}, f"batch={1 << 61}"),
    "no such number": ({"batch": 10**30}, f"batch={10**30}"),
}


@pytest.mark.parametrize(("how", "named"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_batch_that_cannot_be_run_is_refused_in_one_line(net, how, named):
    before = torch.get_num_threads()
    with pytest.raises(InvalidArgumentError, match=named) as caught:
        measure(net, [0.5], seconds=0, **how)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert torch.get_num_threads() == before
    assert not torch.is_inference_mode_enabled()


def test_measuring_leaves_the_network_as_it_is():
    net = small_net()
    plan, module = net.resize_(macs=0.4), net.module
    said = []
    entry = measure(net, [0.5], seconds=0, batch=2, say=said.append)
    assert net.plan() is plan
    assert net.module is module
    assert entry.setting == ("torch", 2, torch.get_num_threads())
    assert [timed.size for timed in entry.sizes] == [net.plan(macs=0.5).macs_fraction, 1.0]
    assert all(timed.repetitions == 5 and timed.low_ms > 0 for timed in entry.sizes)
    assert said == ["torch: making 2 sizes", "torch: timing 2 sizes side by side"]


@pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")
def test_a_calibrated_size_is_timed_with_its_own_statistics():
    net = small_net()
    net.calibrate_([torch.randn(16, *IMAGE)], sizes=[0.3, 0.6])
    x, plan = torch.randn(2, *IMAGE), net.plan(macs=0.4)
    apart = net.extract(plan)
    assert net.plan().is_full
    net.resize_(plan)
    assert torch.equal(apart(x), net(x))


def test_a_network_that_does_not_know_its_input_has_to_be_told():
    net = small_net(example_input=False)
    with pytest.raises(InvalidArgumentError, match="input= is needed"):
        measure(net, [0.5], seconds=0)
    entry = measure(net, [0.5], seconds=0, input=InputSpec(shape=IMAGE, dtype="float32"))
    assert entry.sizes[0].macs is None
    assert entry.sizes[0].size == net.plan(params=0.5).params_fraction


# The verb


@pytest.fixture
def file(net, tmp_path):
    path = tmp_path / "network.safetensors"
    net.save(path)
    return path


def test_bench_prints_the_times_and_keeps_them_beside_the_file(file, net, call):
    code, out, _ = call("bench", file, "--sizes", "50%,0.3", "--seconds", 0, "--runtime", "torch", "--batch", 2)
    assert code == 0
    rows = [line.split() for line in out.split("\n\n")[0].splitlines()[1:]]
    sizes = [net.selector.of_size(size, align="auto").macs_fraction for size in (1.0, 0.5, 0.3)]
    assert [row[1] for row in rows] == [f"{size:.3f}" for size in sizes]
    assert [row[0] for row in rows] == ["torch"] * 3
    assert rows[0][6] == "1.00x"
    assert "batch 2, " in out
    found = LatencyProfile.load_beside(file)
    found.check_network(net.selector)
    assert found.entry(runtime="torch", batch=2).sizes[-1].size == 1.0
    assert f"{file}.latency.json" in out
    assert found.entry(runtime="torch", batch=2).align == "auto"  # the default, and it says what that is
    assert "torch: align=auto: wide layers' ranks rounded to multiples of 16, 8 or 4 where that moves them by at" in out


def test_what_was_measured_is_known_to_a_network_that_is_loaded(file, call):
    assert call("bench", file, "--sizes", "0.5,0.3", "--seconds", 0, "--runtime", "torch")[0] == 0
    again = dn.load(file)
    times = again.latency.entry(runtime="torch").sizes
    assert again.resize_(latency_ms=max(size.median_ms for size in times)).is_full
    plan = again.resize_(latency_ms=times[0].median_ms)  # of the smallest; a larger one may have been as fast
    assert plan.macs >= times[0].macs
    again.latency = None
    with pytest.raises(InvalidArgumentError, match="there is no latency profile"):
        again.resize_(latency_ms=1.0)


@pytest.mark.slow
def test_bench_in_both_runtimes_as_json(file, call, tmp_path):
    pytest.importorskip("onnxscript")
    out_file = tmp_path / "other.json"
    code, out, _ = call("bench", file, "--sizes", "0.4", "--seconds", 0, "--threads", 1, "--out", out_file, "--json")
    assert code == 0
    content = json.loads(out)
    assert [entry["runtime"] for entry in content["entries"]] == ["torch", "onnxruntime"]
    for entry in content["entries"]:
        dense, small = entry["sizes"]
        assert (entry["batch"], entry["threads"], dense["macs_fraction"]) == (1, 1, 1.0)
        assert dense["speed_up"] == 1.0
        assert small["speed_up"] == pytest.approx(dense["median_ms"] / small["median_ms"])
    assert {e.runtime for e in LatencyProfile.load(out_file).entries} == {"torch", "onnxruntime"}
    assert not LatencyProfile.path_beside(file).exists()


def test_bench_tries_alignments(file, call):
    code, out, _ = call(
        "bench", file, "--sizes", "0.6,0.4", "--seconds", 0, "--runtime", "torch", "--align", "measured"
    )
    assert code == 0
    entry = LatencyProfile.load_beside(file).entry(runtime="torch")
    assert dict(entry.trials)[1] == 1.0
    assert f"torch: align={entry.align}: ranks " in out
    assert "(relative times by alignment: 1: 1.000, auto: " in out
    code, out, _ = call("bench", file, "--sizes", "0.6", "--seconds", 0, "--runtime", "torch", "--align", "8")
    assert code == 0
    assert "torch: align=8: ranks rounded to multiples of 8\n" in out
    assert LatencyProfile.load_beside(file).entry(runtime="torch").align == 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--runtime", "torch,tf"], ["--runtime", "tf", "onnxruntime"]),
        (["--sizes", "half"], ["--sizes", "half"]),
        (["--sizes", "0.0001"], ["0.0001", "too small"]),
        (["--sizes", "0.5,1.5"], ["--sizes 0.5,1.5: 1.5 is no size; allowed: a part"]),
        (["--sizes=-0.5"], ["--sizes -0.5: -0.5 is no size"]),
        (["--sizes", "0"], ["--sizes 0: 0 is no size"]),
        (["--sizes", "nan"], ["--sizes nan: nan is no size"]),
        (["--sizes", "infM"], ["--sizes infM: not a size"]),
        (["--batch", "0"], ["--batch: 0; allowed: a whole number from 1 to 1,048,576"]),
        (["--batch", "x"], ["--batch: x; allowed: a whole number"]),
        (["--batch", "9" * 5000], ["--batch: 999", "; allowed: a whole number"]),
        (["--threads", "x"], ["--threads: x; allowed: a whole number from 1"]),
        (["--threads", "0"], ["--threads: 0; allowed"]),
        (["--threads", "100000"], ["--threads: 100000; allowed: a whole number from 1 to "]),
        (["--threads", "9" * 30], ["--threads: 999", "; allowed"]),
        (["--seconds", "-1"], ["--seconds", "-1"]),
        (["--seconds", "soon"], ["--seconds: soon; allowed: seconds from 0 to 86400"]),
        (["--seconds", "nan"], ["--seconds: nan; allowed"]),
        (
            ["--align", "best"],
            ["--align: best; allowed: an int of at least 1, such as 8, and at most 65536; or auto or measured"],
        ),
        (["--align", "²"], ["--align: ²; allowed"]),
        (["--align", "0"], ["--align: 0; allowed"]),
        (["--align", "9" * 23], ["--align: 999", "; allowed"]),
        (["--input", "3x"], ["--input", "3x"]),
        (["--input", "²x8"], ["--input ²x8: not a shape"]),
        (["--input", "9" * 5000], ["--input 999", "not a shape"]),
        (["--input", "3x8"], ["batch=1 of 3x8 (float32): torch cannot run the network on it ("]),
        (["--input", "5x8x8"], ["batch=1 of 5x8x8 (float32): torch cannot run"]),
        (["--input", "1x8x8:int64"], ["batch=1 of 1x8x8 (int64): torch cannot run"]),
        (["--input", "16777215x16777215x16777215"], ["--input 16777215x", "a batch cannot be made"]),
        (["--input", "8:quint8"], ["--input 8:quint8: a batch cannot be made"]),
        (["--input", "1x4096x4096", "--batch", "1048576"], ["batch=1048576 of 1x4096x4096", "no such batch here"]),
        (["--model", "nowhere"], ["--model", "nowhere"]),
    ],
)
def test_a_wrong_call_is_one_line_and_code_2(file, call, arguments, named):
    code, out, err = call("bench", file, "--runtime", "torch", "--seconds", 0, *arguments)
    assert code == 2
    assert out == ""
    line = err.strip().splitlines()[-1]
    assert all(word in line for word in named), err
    assert "Traceback" not in err
    assert not LatencyProfile.path_beside(file).exists()


def test_nothing_but_a_profile_is_replaced_and_nothing_is_measured_in_vain(file, call, tmp_path, monkeypatch):
    monkeypatch.setattr("decomposable.export.measuring.measure", None)  # never called
    thesis, beside = tmp_path / "thesis.json", LatencyProfile.path_beside(file)
    thesis.write_text("{}")
    beside.write_text('{"format": 2}')
    wrong = {
        ("--out", file): [f"--out {file}: ", "is not a latency profile", "not replaced"],
        ("--out", thesis): [f"--out {thesis}: ", "'format' of it is missing"],
        ("--out", tmp_path): [f"--out {tmp_path}: it is a folder"],
        ("--out", tmp_path / "none" / "p.json"): [f"there is no folder {tmp_path / 'none'}"],
        (): [f"error: {beside}: ", "its format is version 2, this package reads 1"],
    }
    before = {path: path.read_bytes() for path in (file, thesis, beside)}
    for arguments, named in wrong.items():
        code, out, err = call("bench", file, "--seconds", 0, *arguments)
        assert (code, out) == (2, "")
        assert all(word in err for word in named), err
        assert err.count("\n") == 1
    assert {path: path.read_bytes() for path in before} == before
    assert sorted(tmp_path.iterdir()) == sorted(before)


@pytest.mark.slow
def test_a_corrupt_latency_profile_can_be_replaced_by_measuring_again(file, call):
    beside = LatencyProfile.path_beside(file)
    beside.write_text('{"format": 1, "netw')
    code, _, err = call("bench", file, "--sizes", "0.5", "--seconds", 0, "--runtime", "torch")
    assert code == 0, err
    assert err.splitlines()[-1].startswith(f"decomposable bench: warning: {beside}: it was damaged (it is not JSON")
    assert len(LatencyProfile.load(beside).entries) == 1


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_both_runtimes_are_measured_with_the_same_number_of_threads(threads, file, call):
    """Both take as many as PyTorch, and say how many those are."""
    pytest.importorskip("onnxscript")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        code, out, err = call("bench", file, "--sizes", "0.5", "--seconds", 0)
        assert code == 0, err
        assert f"; batch 1, {threads} thread{'s' if threads > 1 else ''}; " in out
        entries = LatencyProfile.load_beside(file).entries
        assert {entry.runtime: entry.threads for entry in entries} == dict.fromkeys(["torch", "onnxruntime"], threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("wrong", [["--input", "3x8"], ["--input", "5x8x8"], ["--input", "1x8x8:int64"]])
def test_a_wrong_input_is_one_line_in_onnx_runtime_too(file, call, wrong):
    pytest.importorskip("onnxscript")
    code, out, err = call("bench", file, "--sizes", "0.5", "--seconds", 0, "--runtime", "onnxruntime", *wrong)
    assert code in (1, 2)
    assert out == ""
    assert err.splitlines()[-1].startswith("decomposable bench: error: ")
    assert "Traceback" not in err


def test_a_file_that_is_not_there_is_code_1(call, tmp_path):
    code, _, err = call("bench", tmp_path / "nothing.safetensors")
    assert code == 1
    assert "nothing.safetensors" in err


def test_a_file_without_an_input_asks_for_one(call, tmp_path):
    path = tmp_path / "network.safetensors"
    small_net(example_input=False).save(path)
    arguments = ["bench", path, "--sizes", "0.5", "--seconds", 0, "--runtime", "torch"]
    code, _, err = call(*arguments)
    assert code == 2
    assert "--input is needed" in err
    code, _, _ = call(*arguments, "--input", "1x8x8")
    assert code == 0
    assert LatencyProfile.load_beside(path).entries[0].sizes[-1].macs is None


def test_a_file_of_one_size_is_refused(file, call, tmp_path):
    small = tmp_path / "small.safetensors"
    assert call("resize", file, "--macs", "0.5", "-o", small)[0] == 0
    code, _, err = call("bench", small, "--runtime", "torch", "--seconds", 0)
    assert code == 2
    assert "no decomposed network" in err
