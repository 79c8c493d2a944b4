"""The command line of a device, called as users call it."""

import json
import shutil
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sealing import seal
from torch import nn

import decomposable as dn
from decomposable_edge import AnySizeSession
from decomposable_edge.command import main, read_arrays
from decomposable_edge.errors import DecomposableError, InvalidArgumentError
from decomposable_edge.sizing.latency import LatencyProfile


@pytest.fixture
def file(tiny, tmp_path):
    return shutil.copy(tiny, tmp_path / "tiny.safetensors")


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
    path = tmp_path / "known.safetensors"
    path.write_bytes(seal(model, description, arrays))
    code, out, _ = call("sizes", path)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines() if line.endswith("%")] == ["91.50%", "80.00%"]


def test_bench_keeps_what_it_measured(file, call):
    code, out, _ = call("bench", file, "--sizes", "0.5", "--seconds", "0", "--threads", "1", "--batch", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["size", "1.000"]
    assert "onnxruntime, batch 2, 1 thread" in out
    assert AnySizeSession(file, latency_ms=1e6, threads=1).plan().is_full
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
    assert err.startswith(f"decomposable-edge bench: warning: {beside}: it was damaged (it is not JSON")
    assert "align=auto: wide layers' ranks rounded to multiples of 16, 8 or 4 where that moves them by at most" in out
    [entry] = LatencyProfile.load(beside).entries
    assert entry.align == "auto"


def test_times_with_other_threads_are_not_used(file, call):
    assert call("bench", file, "--sizes", "0.5", "--seconds", "0", "--threads", "2")[0] == 0
    with pytest.raises(DecomposableError, match=r"onnxruntime, threads 1 was not measured, but .*batch 1, 2 threads"):
        AnySizeSession(file, latency_ms=1e6, threads=1)
    assert AnySizeSession(file, latency_ms=1e6, threads=2).plan().is_full


@pytest.mark.parametrize("batch", [1 << 45, 1 << 61, 10**30])
def test_a_batch_that_does_not_fit_is_refused_in_one_line(file, batch):
    with pytest.raises(InvalidArgumentError, match=rf"batch={batch}: there is no such batch here \(") as caught:
        AnySizeSession(file, threads=1).measure([0.5], batch=batch, seconds=0)
    assert "\n" not in str(caught.value)


def test_what_the_runtime_cannot_run_is_refused_in_one_line(tiny, monkeypatch):
    def run(outputs, feeds):
        raise RuntimeError("bad allocation\n  frame 0")

    session = AnySizeSession(tiny, threads=1)
    monkeypatch.setattr(session, "_make", lambda plan, spins: SimpleNamespace(runtime=SimpleNamespace(run=run)))
    with pytest.raises(
        InvalidArgumentError, match=r"^batch=2: ONNX Runtime cannot run .*RuntimeError: bad allocation fr"
    ):
        session.measure([0.5], batch=2, seconds=0.0, align=None)


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
        (["sizes", "none.safetensors"], 1, "No such file"),
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


def npy(header, content=b"", version=b"\x01\x00"):
    text = header.encode() + b" " * (118 - len(header)) + b"\n" if len(header) < 118 else header.encode()
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text + content


HOSTILE = {
    "objects": npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", b"cos\nsystem\n(S'true'\ntR."),
    "huge": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,), }", bytes(8)),
    "huge in two": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }", bytes(8)),
    "huge number": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",), }", bytes(8)),
    "negative": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -1), }", bytes(8)),
    "short": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 6), }", bytes(40)),
    "deep": npy("(" * 9000 + ")" * 9000),
    "code": npy("__import__('os').mkdir('owned')"),
    "no type": npy("{'descr': 'nonsense', 'fortran_order': False, 'shape': (2, 6), }", bytes(48)),
    "no width": npy("{'descr': '<U0', 'fortran_order': False, 'shape': (99999999999,), }"),
    "another version": npy("{}", version=b"\x09\x00"),
    "empty": b"",
    "half a magic": b"\x93NUM",
    "a pickle": b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00]\x94K\x01a.",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_array_is_one_line_and_code_2(file, call, tmp_path, kind):
    (tmp_path / "x.npy").write_bytes(HOSTILE[kind])
    code, out, err = call("run", file, tmp_path / "x.npy", "-o", tmp_path / "y.npy")
    assert (code, out) == (2, "")
    assert f"{tmp_path / 'x.npy'}: not an array" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "y.npy").exists()


@pytest.mark.parametrize("x", [np.ones((2, 6), "<f4"), np.asfortranarray(np.ones((2, 6), ">f4"))], ids=["C", "Fortran"])
def test_arrays_of_either_order_are_read(tmp_path, x):
    np.save(tmp_path / "x.npy", x)
    np.testing.assert_array_equal(read_arrays(tmp_path / "x.npy"), x)


def test_escape_sequences_out_of_a_bundle_are_shown_and_not_obeyed(tiny_parts, tmp_path, call):
    model, description, arrays = tiny_parts()
    evil = "\x1b]0;owned\x07\u202e"
    for name in (port.name for port in (*model.graph.input,)):
        for node in model.graph.node:
            node.input[:] = [evil if taken == name else taken for taken in node.input]
    model.graph.input[0].name = evil
    (tmp_path / "evil.safetensors").write_bytes(seal(model, description, arrays))
    code, out, err = call("sizes", tmp_path / "evil.safetensors")
    assert code == 0
    assert r"Input: \x1b]0;owned\x07\u202e (" in out
    assert all(letter.isprintable() or letter == "\n" for letter in out + err)


def test_odd_values_in_info_are_passed_over(tiny_parts, tmp_path, call):
    model, description, arrays = tiny_parts()
    odd = [None, True, -1, 10**300, 1e300, "x", [], {}]
    rows = [{"size": a, "accuracy": b} for a in (1.0, *odd) for b in (50.0, *odd)]
    for sizes in (*odd, [*odd, *rows]):
        (tmp_path / "odd.safetensors").write_bytes(seal(model, {**description, "info": {"sizes": sizes}}, arrays))
        assert call("sizes", tmp_path / "odd.safetensors")[0] == 0


def test_a_broken_file_is_one_line(file, call):
    file.write_bytes(file.read_bytes()[:-1])
    code, _, err = call("sizes", file)
    assert code == 1
    assert err.startswith(f"decomposable-edge sizes: error: {file}: not a whole safetensors file (its tensors end at")
    assert err.count("\n") == 1


def test_a_network_of_several_inputs_and_outputs(call, tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(5, 6), nn.Linear(6, 4)

        def forward(self, ids, mask):
            h = self.linear(self.table(ids)) * mask.unsqueeze(-1)
            return {"file": h, "sum": h.sum(1)}

    torch.manual_seed(0)
    batch = {"ids": torch.tensor([[4, 1, 2]]), "mask": torch.ones(1, 3)}
    net = dn.decompose(Two().eval(), batch, forward=lambda n, b: n(**b))
    file = tmp_path / "two.safetensors"
    net.save(file, onnx=True, dynamic={name: {1: "length"} for name in batch})
    code, out, err = call("sizes", file)
    assert (code, err) == (0, "")
    assert "ids (batch × length, int64), mask (batch × length, float32)" in out
    assert call("bench", file, "--sizes", "0.7", "--seconds", "0", "--threads", "1")[0] == 0
    feeds = {"ids": np.array([[1, 4], [0, 2]]), "mask": np.array([[1, 1], [1, 0]], np.float32)}
    np.savez(tmp_path / "x.npz", **feeds)
    code, out, err = call("run", file, tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--threads", "1")
    assert (code, err) == (0, "")
    found = np.load(tmp_path / "y.npz")
    with torch.no_grad():
        wanted = net(*map(torch.from_numpy, feeds.values()))
    for name, y in wanted.items():
        np.testing.assert_allclose(found[name], y.numpy(), atol=1e-5)
    code, _, err = call("run", file, tmp_path / "x.npz", "-o", tmp_path / "y.npy", "--threads", "1")
    assert code == 2
    assert "2 outputs; allowed: .npz" in err
    np.savez(tmp_path / "x.npz", ids=feeds["ids"])
    code, _, err = call("run", file, tmp_path / "x.npz", "-o", tmp_path / "y.npz", "--threads", "1")
    assert code == 2
    assert "got the inputs ids; allowed: ids, mask" in err


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lengths": {"length": 0}}, "'length' of lengths is 0"),
        ({"lengths": {"length": 1 << 40}}, "'length' of lengths"),
        ({"lengths": 3}, "lengths"),
        ({"values": {"x": [3, 2]}}, "the values of 'x'"),
        ({"values": {"x": "all"}}, "the values of 'x'"),
    ],
)
def test_wrong_lengths_and_values_are_refused(tiny_parts, tmp_path, call, fields, words):
    model, description, arrays = tiny_parts()
    path = tmp_path / "wrong.safetensors"
    description["onnx"] |= fields
    path.write_bytes(seal(model, description, arrays))
    code, out, err = call("sizes", path)
    assert (code, out) == (1, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "entries", [{}, {"x.npy": b""}, {"x.npy": npy("{}")}, {"x": b"cos\nsystem\n(S'true'\ntR."}], ids=len
)
def test_an_archive_of_anything_else_is_one_line(tiny, tmp_path, capsys, entries):
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    assert main(["run", str(tiny), str(path), "-o", str(tmp_path / "y.npy")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "allowed: x" in error if not entries else f"{path}: not an array" in error
    assert not (tmp_path / "y.npy").exists()


def test_a_compressed_archive_is_read(tmp_path):
    np.savez_compressed(tmp_path / "x.npz", x=np.ones(3))
    np.testing.assert_array_equal(read_arrays(tmp_path / "x.npz")["x"], np.ones(3))
