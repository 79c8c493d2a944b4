"""What SECURITY.md promises for files of strangers, as a whole; the tests of each reader have the details."""

import io
import json
import pickle
import random
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.network import artifact
from decomposable.training.checkpoint import CheckpointError, Checkpoints
from decomposable.training.weights import WeightsError, read_weights
from decomposable_edge.errors import ArtifactError, DecomposableError
from decomposable_edge.fields import MOST_VALUES
from decomposable_edge.file.header import MOST_BYTES

ROOT = Path(__file__).parents[1]
READING = """
import re, sys
from pathlib import Path
from decomposable.network import artifact
from decomposable.training.checkpoint import read_checkpoint
from decomposable_edge.errors import DecomposableError
from decomposable.training.weights import read_weights

def kilobytes(name):
    return int(re.search(name + r":\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])

for argument in sys.argv[1:]:
    path = Path(argument)
    read = {".artifact": artifact.read, ".checkpoint": read_checkpoint}.get(path.suffix, read_weights)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = kilobytes("VmRSS")
    try:
        read(path)
    except DecomposableError as error:
        assert str(error).isprintable()
    print(path.name, 1024 * (kilobytes("VmHWM") - before))
"""


def write_checkpoint(path, model):
    whole = {name: {} for name in ("run", "position", "optimizer", "method", "bits_depend_on")}
    Checkpoints(path, every_seconds=0).write({**whole, "model": model})


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak cannot be measured here")
def test_reading_takes_no_more_memory_than_is_promised(tmp_path):
    """Ordinary files take little more than their size; the worst header that is allowed stays within the rest."""
    state = {f"{i}.weight": torch.randn(1800, 1800) for i in range(3)}
    write_checkpoint(tmp_path / "a.checkpoint", state)
    torch.save(state, tmp_path / "b.pt")
    torch.save(state, tmp_path / "c.pt", _use_new_zipfile_serialization=False)
    dn.decompose(nn.Linear(900, 900)).save(tmp_path / "d.artifact")
    # The largest header, in letters that take four bytes each where Python has them.
    pairs = ",".join(f'"\U0001f600{i:09}":"\U0001f600{i:09}"' for i in range(999_900))
    header = f'{{"__metadata__":{{{pairs}}}}}'.encode()[:32_000_000]
    (tmp_path / "worst.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    files = sorted(tmp_path.iterdir())
    environment = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", READING, *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    taken = {name: int(peak) for name, peak in map(str.split, done.stdout.splitlines())}
    for file in files:
        size = file.stat().st_size
        assert taken[file.name] < 4 * size + 512_000_000  # what SECURITY.md says
        assert file.stem == "worst" or taken[file.name] < 2.5 * size + 16_000_000


def test_the_numbers_in_the_text_are_those_of_the_code():
    text = " ".join((ROOT / "SECURITY.md").read_text().split())
    assert f"at most {MOST_BYTES // 10**6} MB and {MOST_VALUES:,} values" in text


def test_no_file_is_unpickled_by_our_code():
    """What can unpickle is called with the word that keeps it from running code, or not at all."""
    call = re.compile(r"\b(torch\.load|pickle\.loads?|Unpickler|np\.load|numpy\.load)\([^\n]*")
    safe = {"training/weights.py": "weights_only=True", "decomposable_edge/command.py": "allow_pickle=False"}
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "laboratory" / "src").rglob("*.py")]
    found = {
        f"{path.parent.name}/{path.name}": [each[0] for each in call.finditer(path.read_text())] for path in sources
    }
    assert {name for name, calls in found.items() if calls} == set(safe)
    assert all(word in each for name, word in safe.items() for each in found[name])


# A modest fuzz, the same every time. Checksums are made right again, so that it is the readers that are tested.


def changed(value, chance):
    """Another value somewhere inside of some JSON."""
    odd = [None, True, -1, 0, 1, 2**31, 2**63, 1.5, "", "x", "\x1b[2J", [], {}, [1], {"a": 1}, {"tensor": "0/model/a"}]
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        return [*value[:place], changed(value[place], chance), *value[place + 1 :]]
    return chance.choice(odd)


def lines_of(read, write, rounds, chance):
    """What is said of files that were changed; whatever else is raised ends the test."""
    lines = []
    for _ in range(rounds):
        write(chance)
        try:
            read()
        except DecomposableError as error:
            lines.append(str(error))
    assert all(line.isprintable() and len(line) < 1500 for line in lines)
    return lines


def test_checkpoints_that_say_anything_are_read_or_refused_in_one_line(tmp_path):
    from decomposable.network.file.container import read_container, write_container

    path, other = tmp_path / "a.pt", tmp_path / "b.pt"
    write_checkpoint(path, {"a": torch.randn(3, 2), "n": {1: (2, None)}})
    description, tensors = read_container(path)

    def write(chance):
        wrong = changed({k: v for k, v in description.items() if k not in ("sha256", "format")}, chance)
        write_container(other, wrong if isinstance(wrong, dict) else {}, tensors)

    lines = lines_of(lambda: Checkpoints(other, every_seconds=0).read(), write, 300, random.Random(0))
    assert len(lines) > 100


@pytest.mark.parametrize("kind", ["artifact", "checkpoint"])
def test_headers_of_any_content_are_read_or_refused_in_one_line(kind, tmp_path):
    """Of safetensors itself: entries, offsets, types and shapes; and bytes that are no header."""
    path = tmp_path / "file"
    if kind == "artifact":
        dn.decompose(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))).save(path)
    else:
        write_checkpoint(path, {"a": torch.randn(3, 2)})
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])

    def write(chance):
        if chance.random() < 0.7:
            text = json.dumps(changed(header, chance)).encode()
        else:
            text = bytearray(whole[8 : 8 + length])
            for _ in range(3):
                text[chance.randrange(length)] = chance.randrange(256)
        path.write_bytes(len(text).to_bytes(8, "little") + bytes(text) + whole[8 + length :])

    def read():
        artifact.read(path) if kind == "artifact" else Checkpoints(path, every_seconds=0).read()

    assert len(lines_of(read, write, 300, random.Random(2))) == 300  # the checksum finds all of them


class _Odd:
    """A value that pickles itself as a call."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return self.call


def odd_pickle(chance):
    """A pickle of the names, numbers and nestings that files of torch.save have, in any order."""
    calls = [
        (torch._utils._rebuild_tensor_v2, ("x", 0, (2,), (1,), False, {})),
        (torch._utils._rebuild_tensor_v2, (1, 2, 3)),
        (torch.Size, ((1, 2),)),
        (torch.device, ("cpu",)),
        (bytearray, (10**12,)),
        (eval, ("1",)),
    ]

    def value(depth):
        kind = chance.randrange(7 if depth else 3)
        if kind == 0:
            return chance.choice([None, True, 10**30, -1, 0.5, "x", b"y", 2**70])
        if kind == 1:
            return _Odd(chance.choice(calls))
        if kind == 2:
            return torch.float32 if chance.random() < 0.5 else "\x1b[2J"
        if kind in (3, 4):
            return {chance.choice(["a", "state_dict", 3]): value(depth - 1) for _ in range(chance.randrange(3))}
        entries = [value(depth - 1) for _ in range(chance.randrange(3))]
        return entries if kind == 5 else tuple(entries)

    buffer = io.BytesIO()
    pickle.Pickler(buffer, chance.choice([2, 3, 4])).dump(value(3))
    content = bytearray(buffer.getvalue())
    if chance.random() < 0.5:
        content[chance.randrange(len(content))] = chance.randrange(256)
    return bytes(content)


def test_archives_with_any_pickle_are_read_or_refused_in_one_line(tmp_path):
    path = tmp_path / "x.pt"

    def write(chance):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x/data.pkl", odd_pickle(chance))
            archive.writestr("x/data/0", bytes(16))

    lines = lines_of(lambda: read_weights(path), write, 400, random.Random(3))
    assert len(lines) == 400  # none of them is a state dict


def test_the_errors_are_of_the_kinds_that_are_promised():
    assert all(issubclass(kind, DecomposableError) for kind in (ArtifactError, CheckpointError, WeightsError))
