"""The command line of a device, called as users call it."""

import json
import shutil

import numpy as np
import pytest

from decomposable.edge import AnySizeSession
from decomposable.edge.command import main
from decomposable.edge.container import seal


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


def test_run_writes_the_output_of_a_size(file, call, tmp_path):
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    code, out, _ = call("run", file, tmp_path / "x.npy", "-o", tmp_path / "y.npy", "--macs", "50%", "--threads", "1")
    assert code == 0
    assert "2 × 6, float32" in out
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), AnySizeSession(file, macs=0.5, threads=1).run(x))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "VERB"),
        (["nothing"], 2, "invalid choice"),
        (["sizes", "none.onnx"], 1, "No such file"),
        (["bench", "FILE", "--align", "x"], 2, "--align x"),
        (["bench", "FILE", "--sizes", "big"], 2, "--sizes"),
        (["bench", "FILE", "--seconds", "-1"], 2, "--seconds"),
        (["bench", "FILE", "--threads", "0"], 2, "threads=0"),
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
