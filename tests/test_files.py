import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable_edge import files, locks


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


KILLED = """
import os, signal, sys
from pathlib import Path

import safetensors.torch, torch

target, kind = Path(sys.argv[1]), sys.argv[2]


def die(*_, **__):
    print(*(str(p.relative_to(target.parent)) for p in target.parent.rglob("*")), sep=chr(10), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


if kind == "plain":
    from decomposable_edge import files

    with files.replacing(target) as unfinished:
        unfinished.write_bytes(b"half of it" * 100_000)
        (unfinished.parent / ".tmpOfALibrary").write_bytes(b"and more")  # as safetensors does
        die()
else:
    import decomposable as dn

    os.fsync = die  # after everything was written, before it takes its place
    dn.decompose(torch.nn.Linear(300, 300)).save(target)
"""


def kill_while_saving(path, kind):
    """Run a process that saves to `path` and is killed in the middle; the names of what it left come back."""
    process = subprocess.run([sys.executable, "-c", KILLED, str(path), kind], capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    return process.stdout.split()


@pytest.mark.parametrize("kind", ["plain", "network"])
def test_a_killed_save_leaves_nothing_behind_once_there_is_another_save(kind, tmp_path):
    path = tmp_path / "net.safetensors"
    path.write_bytes(b"old")
    assert len(kill_while_saving(path, kind)) > 2
    assert path.read_bytes() == b"old"
    [left] = [p for p in tmp_path.iterdir() if p != path]
    assert sum(p.stat().st_size for p in left.rglob("*")) > 300_000  # the size of the file
    dn.decompose(nn.Linear(3, 3)).save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_save_of_another_file_in_the_folder_removes_it_too(tmp_path):
    kill_while_saving(tmp_path / "net.safetensors", "plain")
    files.write_atomically(tmp_path / "record.json", b"{}")
    assert list(tmp_path.iterdir()) == [tmp_path / "record.json"]


def test_what_another_process_is_writing_stays(tmp_path):
    path = tmp_path / "record.json"
    with files.replacing(path) as unfinished:
        unfinished.write_bytes(b"slow")
        program = "import sys; from pathlib import Path; from decomposable_edge import files; "
        program += "files.write_atomically(Path(sys.argv[1]), b'fast'); files.sweep(Path(sys.argv[1]).parent)"
        subprocess.run([sys.executable, "-c", program, str(path)], check=True)
        assert path.read_bytes() == b"fast"
        assert unfinished.read_bytes() == b"slow"
    assert path.read_bytes() == b"slow"
    assert list(tmp_path.iterdir()) == [path]


def test_what_only_looks_like_it_stays_and_so_does_what_another_machine_may_be_writing(tmp_path):
    with files.replacing(tmp_path / "record.json") as unfinished:
        unfinished.touch()
        ours = unfinished.parent.name
    theirs = ours.replace(files._machine(), "0123abcd")
    kept = [tmp_path / name for name in ("record.json", ".record.json.bak", ".record.json.1.2", f"x{ours}x")]
    for file in kept:
        file.write_bytes(b"")
    for name in (ours, theirs):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_bytes(b"half")
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / ours.replace("record", "linked")
    link.symlink_to(outside)
    files.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([*kept, tmp_path / theirs, outside, link])
    days_ago = time.time() - 2 * 86_400
    os.utime(tmp_path / theirs, (days_ago, days_ago))
    files.sweep(tmp_path)
    assert not (tmp_path / theirs).exists()


def test_a_target_may_have_a_long_name(tmp_path):
    path = tmp_path / ("ü" * 120)
    files.write_atomically(path, b"content")
    assert path.read_bytes() == b"content"


def test_processes_that_save_one_file_at_once_leave_a_whole_one_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    program = "import sys; from pathlib import Path; from decomposable_edge import files; "
    program += "[files.write_atomically(Path(sys.argv[1]), sys.argv[2].encode() * 100_000) for _ in range(40)]"
    processes = [subprocess.Popen([sys.executable, "-c", program, str(path), letter]) for letter in "abc"]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert path.read_bytes() in [letter * 100_000 for letter in (b"a", b"b", b"c")]
    assert list(tmp_path.iterdir()) == [path]


HOLDER = """
import os, signal, sys, time
from pathlib import Path
from decomposable_edge.locks import holding

with holding(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        os.close(1)
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_lock_goes_with_the_process_that_was_killed_though_its_child_lives(tmp_path):
    path = tmp_path / ".lock"
    process = subprocess.run([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.returncode == -signal.SIGKILL
        assert path.exists()
        with locks.holding(path, wait=False):
            pass
    finally:
        os.kill(int(process.stdout), signal.SIGKILL)
    assert not path.exists()


def test_who_does_not_wait_for_a_lock_is_told(tmp_path):
    refused = pytest.raises(BlockingIOError)
    with locks.holding(tmp_path / ".lock"), refused, locks.holding(tmp_path / ".lock", wait=False):
        pass
    assert list(tmp_path.iterdir()) == []
