"""The command line of a device, called as users call it."""

import json
import shutil

import numpy as np
import pytest

from decomposable.edge import AnySizeSession
from decomposable.edge.command import main
from decomposable.edge.container import seal
from decomposable.edge.measuring import example, time_sizes
from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.latency import LatencyProfile


@pytest.fixture
def file(tiny, tmp_path):
    return shutil.copy(tiny, tmp_path / "tiny.onnx")


@pytest.fixture
def call(capsys):
    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        return (code, *capsys.readouterr())

    return call


def test_sizes(file, call):
    code, out, err = call("sizes", file)
    assert (code, err) == (0, "")
    rows = out.split("\n\n")[0].splitlines()
    assert rows[0].split() == ["MACs", "of", "all", "parameters", "of", "all", "ranks", "accuracy"]
    assert rows[1].split() == ["72", "1.000", "72", "1.000", "6-6"]
    assert "x (batch × 6, float32)" in out
    code, out, _ = call("sizes", file, "--json")
    assert json.loads(out)["sizes"][-1]["ranks"] == [1, 1]


def test_sizes_shows_the_accuracies_that_the_file_knows(tiny_parts, tmp_path, call):
    model, description, arrays = tiny_parts()
    rows = [{"size": 1.0, "accuracy": 91.5}, {"size": 0.45, "accuracy": 80}, {"size": 0.0001, "accuracy": 1}, "?", {}]
    description["info"] = {"sizes": rows}
    path = tmp_path / "known.onnx"
    path.write_bytes(seal(model, description, arrays))
    code, out, _ = call("sizes", path)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines() if line.endswith("%")] == ["91.50%", "80.00%"]


def test_bench_keeps_what_it_measured(file, call):
    code, out, _ = call("bench", file, "--sizes", "0.5", "--seconds", "0", "--threads", "1", "--batch", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["size", "1.000"]
    assert "onnxruntime, batch 2, 1 thread" in out
    assert AnySizeSession(file, latency_ms=1e6, threads=1).plan.is_full
    assert "batch 2" in call("sizes", file)[1]
    code, out, _ = call("bench", file, "--sizes", "0.5", "--seconds", "0", "--threads", "1", "--json")
    assert json.loads(out)["batch"] == 1


def test_bench_replaces_nothing_but_a_profile(file, call, monkeypatch):
    monkeypatch.setattr(AnySizeSession, "measure", None)  # never called
    beside = LatencyProfile.path_beside(file)
    beside.write_text('{"format": 2}')
    code, out, err = call("bench", file, "--seconds", "0")
    assert (code, out) == (2, "")
    assert f"{beside}: it is there and is not a latency profile (its format is version 2" in err
    assert beside.read_text() == '{"format": 2}'


def test_a_corrupt_latency_profile_can_be_replaced_by_measuring_again(file, call):
    beside = LatencyProfile.path_beside(file)
    beside.write_text("{")
    code, out, err = call("bench", file, "--sizes", "0.5", "--seconds", "0", "--threads", "1")
    assert code == 0
    assert err.startswith(f"decomposable-edge bench: warning: {beside}: it was damaged (it is not JSON)")
    assert "align=auto: wide layers' ranks rounded to multiples of 16, 8 or 4 where that moves them by at most" in out
    [entry] = LatencyProfile.load(beside).entries
    assert entry.align == "auto"


def test_times_with_other_threads_are_not_used(file, call):
    assert call("bench", file, "--sizes", "0.5", "--seconds", "0", "--threads", "2")[0] == 0
    with pytest.raises(DecomposableError, match=r"onnxruntime, threads 1 was not measured, but .*batch 1, 2 threads"):
        AnySizeSession(file, latency_ms=1e6, threads=1)
    assert AnySizeSession(file, latency_ms=1e6, threads=2).plan.is_full


@pytest.mark.parametrize("batch", [1 << 45, 1 << 61, 10**30])
def test_a_batch_that_does_not_fit_is_refused_in_one_line(file, batch):
    with pytest.raises(InvalidArgumentError, match=rf"batch={batch}: there is no such batch here \(") as caught:
        AnySizeSession(file, threads=1).measure([0.5], batch=batch, seconds=0)
    assert "\n" not in str(caught.value)


def test_what_the_runtime_cannot_run_is_refused_in_one_line(tiny):
    def open_size(plan):
        def run(feeds):
            raise RuntimeError("bad allocation\n  frame 0")

        return run

    session = AnySizeSession(tiny, threads=1)
    feeds = example(session.inputs, 2)
    how = {"batch": 2, "threads": 1, "seconds": 0.0, "align": None}
    with pytest.raises(
        InvalidArgumentError, match=r"^batch=2: ONNX Runtime cannot run .*RuntimeError: bad allocation fr"
    ):
        time_sizes(session.selector, open_size, feeds, [0.5], **how)


def test_run_writes_the_output_of_a_size(file, call, tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    code, out, _ = call("run", file, tmp_path / "x.npy", "-o", tmp_path / "y.npy", "--macs", "50%", "--threads", "1")
    assert code == 0
    assert "2 × 6, float32" in out
    assert "wide layers' ranks rounded to multiples of 16, 8 or 4 where" in out
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), AnySizeSession(file, macs=0.5, threads=1).run(x))
    arguments = ["--macs", "50%", "--threads", "1", "--align", "1"]
    code, out, _ = call("run", file, tmp_path / "x.npy", "-o", tmp_path / "y.npy", *arguments)
    assert code == 0
    assert "ranks not rounded" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "VERB"),
        (["nothing"], 2, "invalid choice"),
        (["sizes", "none.onnx"], 1, "No such file"),
        (
            ["bench", "FILE", "--align", "x"],
            2,
            "--align: x; allowed: an int of at least 1, such as 8, and at most 65536",
        ),
        (["bench", "FILE", "--align", "²"], 2, "--align: ²; allowed"),
        (["bench", "FILE", "--align", "9" * 23], 2, "--align: 999"),
        (["bench", "FILE", "--sizes", "big"], 2, "--sizes"),
        (["bench", "FILE", "--sizes", "1.5"], 2, "--sizes 1.5: 1.5 is no size"),
        (["bench", "FILE", "--seconds", "-1"], 2, "--seconds"),
        (["bench", "FILE", "--seconds", "x"], 2, "--seconds: x; allowed: seconds from 0"),
        (["bench", "FILE", "--batch", "x"], 2, "--batch: x; allowed: a whole number from 1"),
        (["bench", "FILE", "--threads", "0"], 2, "--threads: 0; allowed"),
        (["bench", "FILE", "--threads", "100000"], 2, "--threads: 100000; allowed: a whole number from 1 to "),
        (["run", "FILE", "FILE", "-o", "y.npy", "--threads", "100000"], 2, "--threads: 100000; allowed"),
        (["run", "FILE", "FILE", "-o", "y.npy"], 2, "not an array"),
        (["run", "FILE", "none.npy", "-o", "y.npy"], 1, "No such file"),
    ],
)
def test_what_is_wrong_is_one_line(file, call, arguments, code, words):
    found, out, err = call(*(file if argument == "FILE" else argument for argument in arguments))
    assert (found, out) == (code, "")
    assert words in err
    assert err.count("\n") == 1


def test_a_broken_file_is_one_line(file, call):
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = call("sizes", file)
    assert code == 1
    assert (
        err == f"decomposable-edge sizes: error: {file}: not a whole any-size bundle: it does not end with a checksum\n"
    )
