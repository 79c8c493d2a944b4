import os
import threading

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable import files


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "record.json"
    files.write_atomically(path, b"old")

    def fail(self, target):
        raise OSError("no space left")

    monkeypatch.setattr(type(path), "replace", fail)
    with pytest.raises(OSError, match="no space"):
        files.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_threads_that_write_one_file_do_not_mix_theirs(tmp_path):
    path, contents, failures = tmp_path / "record.json", [bytes([i]) * 200_000 for i in range(4)], []
    files.write_atomically(path, contents[0])

    def repeat(use):
        try:
            for _ in range(25):
                use()
        except Exception as error:  # a thread's own is shown by nobody
            failures.append(error)

    def read():
        assert path.read_bytes() in contents

    uses = [lambda content=content: files.write_atomically(path, content) for content in contents]
    in_threads(repeat, [*uses, read, read])
    assert not failures
    assert list(tmp_path.iterdir()) == [path]


def test_threads_that_save_one_network_file_leave_a_whole_one(tmp_path):
    path, x, failures = tmp_path / "net.safetensors", torch.ones(1, 64), []

    def build(i):
        model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8))
        for parameter in model.parameters():
            nn.init.constant_(parameter, i / 100)
        return model

    nets = [dn.decompose(build(i)) for i in range(1, 4)]
    outputs = [net(x) for net in nets]
    nets[0].save(path)

    def repeat(use):
        try:
            for _ in range(12):
                use()
        except Exception as error:
            failures.append(error)

    def read():
        again = dn.load(path, model=build(0))(x)
        assert any(torch.equal(again, output) for output in outputs)

    in_threads(repeat, [*(lambda net=net: net.save(path) for net in nets), read, read])
    assert not failures
    assert list(tmp_path.iterdir()) == [path]


def in_threads(run, uses):
    threads = [threading.Thread(target=run, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_what_a_killed_process_left_is_swept(tmp_path):
    path = tmp_path / "record.json"
    with files.replacing(path) as unfinished:
        left = unfinished.name
        unfinished.touch()
    assert str(os.getpid()) in left
    kept = [tmp_path / name for name in ("record.json", ".record.json.bak", ".record.json.1.a", ".record.json5.1", "a")]
    swept = [tmp_path / name for name in (left, ".record.json.123", ".record.json.123.456")]
    for file in (*kept, *swept):
        file.write_bytes(b"")
    files.sweep(path)
    assert sorted(tmp_path.iterdir()) == sorted(kept)
