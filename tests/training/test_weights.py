"""Starting from weights that somebody else trained."""

import argparse
import io
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.training.torch_zip import MOST_DIRECTORY
from decomposable.training.weights import WeightsError, load_weights_, read_weights, sha256
from decomposable_edge.sizing.plans import SizeRequest


def model(classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 16, classes))


def same(a, b):
    states = a.state_dict(), b.state_dict()
    return states[0].keys() == states[1].keys() and all(torch.equal(v, states[1][k]) for k, v in states[0].items())


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state},
        lambda state: {"state_dict": {f"module.{name}": value for name, value in state.items()}},
        lambda state: {f"module._orig_mod.{name}": value for name, value in state.items()},
        lambda state: {name: value for name, value in state.items() if "num_batches" not in name},
    ],
)
def test_a_state_dict_is_found_however_it_is_wrapped(tmp_path, wrap):
    source, target = model(), model(seed=1)
    torch.save(wrap(source.state_dict()), tmp_path / "weights.th")
    load_weights_(target, tmp_path / "weights.th")
    assert same(source, target)


def test_safetensors(tmp_path):
    source, target = model(), model(seed=1)
    save_file({f"module.{k}": v for k, v in source.state_dict().items()}, tmp_path / "weights.safetensors")
    load_weights_(target, tmp_path / "weights.safetensors")
    assert same(source, target)


def test_a_network_of_ours_gives_its_full_size(tmp_path):
    source, target = model(), model(seed=1)
    net = dn.decompose(source, example_input=torch.zeros(1, 1, 6, 6))
    net.resize_(ratio=1.0)
    net.save(tmp_path / "network.safetensors")
    load_weights_(target, tmp_path / "network.safetensors")
    assert same(source, target)


def test_one_size_of_a_network_is_not_weights_of_the_full_model(tmp_path):
    from decomposable.network import artifact

    net = dn.decompose(model(), example_input=torch.zeros(1, 1, 6, 6))
    net.save(tmp_path / "network.safetensors")
    contents = artifact.read(tmp_path / "network.safetensors")
    artifact.save_size(contents, contents.selector.plan_for(SizeRequest(ratio=0.5)), tmp_path / "small.safetensors")
    target = model(seed=1)
    with pytest.raises(dn.DecomposableError, match=r"small\.safetensors"):
        load_weights_(target, tmp_path / "small.safetensors")
    assert same(target, model(seed=1))


def _spoilt(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_a_model_may_itself_have_a_part_called_module(tmp_path):
    source, target = (nn.ModuleDict({"module": model(seed=seed)}) for seed in (0, 1))
    for state in (source.state_dict(), {f"module.{k}": v for k, v in source.state_dict().items()}):
        torch.save(state, tmp_path / "weights.pt")
        load_weights_(target, tmp_path / "weights.pt")
        assert same(source, target)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"", b"nonsense" * 100, b"PK\x03\x04"])
def test_a_damaged_file_is_one_clear_line(tmp_path, name, content):
    target = model()
    with pytest.raises(WeightsError) as caught:
        load_weights_(target, _spoilt(tmp_path, name, content))
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
    assert same(target, model())


def test_a_truncated_file_is_one_clear_line(tmp_path):
    torch.save(model().state_dict(), tmp_path / "weights.pt")
    whole = (tmp_path / "weights.pt").read_bytes()
    with pytest.raises(WeightsError, match="damaged"):
        read_weights(_spoilt(tmp_path, "cut.pt", whole[: len(whole) // 2]))


def test_code_in_a_file_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"state_dict": {"0.weight": Attack()}}, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match=r"it holds the name 'posix.mkdir'; allowed: tensors"):
        read_weights(tmp_path / "weights.pt")
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1, 2], "holds a list"),
        ({}, "dict of other things"),
        ({"epoch": 3}, "dict of other things"),
    ],
)
def test_what_is_no_state_dict_is_said(tmp_path, content, words):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(WeightsError, match=words):
        read_weights(tmp_path / "weights.pt")


def test_a_missing_file():
    with pytest.raises(WeightsError, match="no such file"):
        read_weights(__import__("pathlib").Path("nowhere.pt"))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: model(classes=5),
            r"'3.weight' has shape \(5, 64\), the model's \(3, 64\) \(another number of classes\?\)",
        ),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 5)), r"'0.weight' has shape \(4, 1, 5, 5\), the model's"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3)), r"6 weights are missing, such as '1.weight'"),
        (lambda: nn.Sequential(*model(), nn.Linear(3, 3)), r"2 are not the model's, such as '4.weight'"),
    ],
)
def test_the_weights_of_another_model_change_nothing(tmp_path, other, words):
    torch.save(other().state_dict(), tmp_path / "weights.pt")
    target = model()
    with pytest.raises(WeightsError, match=words) as caught:
        load_weights_(target, tmp_path / "weights.pt")
    assert "\n" not in str(caught.value)
    assert same(target, model())


def test_the_pretrained_resnet20_in_circulation(shared_data):
    target = models.resnet20(num_classes=10)
    load_weights_(target, shared_data / "resnet20-12fca82f.th")
    assert target.linear.weight.abs().max() > 1


def test_a_checksum_is_of_the_whole_file(tmp_path):
    path = _spoilt(tmp_path, "x", b"abc")
    assert sha256(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 complex128 float8_e4m3fn uint16"
DTYPES = [getattr(torch, name) for name in NAMES.split()]


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_every_kind_of_tensor_is_read_as_torch_reads_it(tmp_path, is_zip):
    shared = torch.randn(4, 6)
    dtypes = DTYPES if is_zip else DTYPES[:-2]  # the newest types have no old files
    state = OrderedDict({str(dtype): torch.randn(3, 2).to(dtype) for dtype in dtypes})
    state |= {"part": shared[1:3, ::2], "turned": shared.t(), "one": torch.tensor(3.0), "none": torch.zeros(0, 7)}
    state["parameter"] = nn.Parameter(torch.randn(2), requires_grad=False)
    state["last"] = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    torch.save({"state_dict": state, "optimizer": torch.optim.SGD([shared]).state_dict(), "loss": 0.5, "at": (1, None)},
               tmp_path / "w.pt", _use_new_zipfile_serialization=is_zip)  # fmt: skip
    read, expected = read_weights(tmp_path / "w.pt"), torch.load(tmp_path / "w.pt", weights_only=True)["state_dict"]
    assert list(read) == list(expected)
    for name, value in expected.items():
        assert (read[name].dtype, read[name].shape, read[name].stride()) == (value.dtype, value.shape, value.stride())
        assert torch.equal(
            read[name].float() if "float8" in name else read[name], value.float() if "float8" in name else value
        )
    assert read["part"].untyped_storage().data_ptr() == read["turned"].untyped_storage().data_ptr()


def _entries(state=None):
    """The entries of an archive of torch.save, by name."""
    buffer = io.BytesIO()
    torch.save(model().state_dict() if state is None else state, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _archive(path, entries, how=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return path


def _refused(path, words, most=5_000_000):
    """In one line, and with little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=words) as caught:
            read_weights(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    assert peak < most


def test_an_archive_that_expands_is_refused_before_it_is_read(tmp_path):
    entries = [(name, bytes(100_000_000) if "data/0" in name else content) for name, content in _entries().items()]
    path = _archive(tmp_path / "x.pt", entries, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 200_000
    _refused(path, "which is compressed or encrypted; allowed")


def test_a_pickle_that_expands_is_refused_before_it_is_read(tmp_path):
    entries = {name: content + bytes(100_000_000) if "pkl" in name else content for name, content in _entries().items()}
    _refused(_archive(tmp_path / "x.pt", entries.items(), zipfile.ZIP_DEFLATED), "compressed or encrypted")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_entry_that_is_there_twice_is_refused(tmp_path):
    entries = list(_entries().items())
    _refused(_archive(tmp_path / "x.pt", [*entries, entries[3]]), "twice, or inside of another entry")


def _with_directory(path, change):
    """The archive with the fields of every directory entry changed: CRC, sizes, place."""
    content = bytearray(path.read_bytes())
    place = content.find(b"PK\x01\x02")
    while place >= 0:
        fields = list(struct.unpack_from("<4s6H3L5H2L", content, place))
        name = bytes(content[place + 46 : place + 46 + fields[10]]).decode()
        struct.pack_into("<4s6H3L5H2L", content, place, *change(name, fields))
        place = content.find(b"PK\x01\x02", place + 46)
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(("field", "value"), [(8, 4), (9, 4), (8, 2**31), (9, 2**31), (16, 0), (16, 2**31), (7, 1)])
def test_a_directory_that_lies_is_refused(tmp_path, field, value):
    def change(name, fields):
        if name.endswith("data/0"):
            fields[field] = value
            if field == 9 and value == 4:
                fields[8] = 4  # both sizes, so that they agree
        return fields

    path = _with_directory(_archive(tmp_path / "x.pt", _entries().items()), change)
    _refused(path, "holds no weights: it (is damaged|holds)")


def test_entries_that_lie_in_one_another_are_refused(tmp_path):
    """Each of them claims the bytes of all."""
    count, size = 200, 100_000
    path = _archive(tmp_path / "x.pt", [*_entries().items(), *((f"archive/data/x{i}", b"") for i in range(count)),
                                        ("archive/data/y", bytes(size))])  # fmt: skip

    def change(name, fields):
        if "/x" in name:
            fields[8] = fields[9] = size
        return fields

    _refused(_with_directory(path, change), "holds no weights: it (is damaged|holds)")


def test_a_directory_of_any_size_is_refused(tmp_path):
    entries = [*_entries().items(), *((f"{i:0>200}", b"") for i in range(36_000))]
    path = _archive(tmp_path / "x.pt", entries)
    assert path.stat().st_size > MOST_DIRECTORY
    _refused(path, "a directory of")


def _with_pickle(tmp_path, value):
    """An archive whose pickle is another one, written by Python."""
    entries = _entries()
    name = next(name for name in entries if name.endswith("data.pkl"))
    return _archive(tmp_path / "x.pt", {**entries, name: value}.items())


class _Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def _claiming(shape, strides, numel=4):
    """The pickle of a state dict whose one tensor claims this of a storage of 16 bytes."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if value is Pickler else None

    made = _Call(torch._utils._rebuild_tensor_v2, Pickler, 0, shape, strides, False, OrderedDict())
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"w": made})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("shape", "strides", "numel"),
    [
        ((10**9,), (0,), 4),  # one number, said to be a thousand million
        ((10**9,), (1,), 4),
        ((2,), (4,), 4),
        ((2, 2), (1,), 4),
        ((-1,), (1,), 4),
        ((2.0,), (1,), 4),
        ((3, 3), (1, 1), 4),  # nine numbers of four
        ((4,), (1,), 10**12),
        ((4,), (1,), -1),
        ((1,) * 99, (1,) * 99, 4),
    ],
)
def test_a_tensor_that_claims_more_than_is_stored_is_refused(tmp_path, shape, strides, numel):
    path = _archive(tmp_path / "x.pt", [("a/data.pkl", _claiming(shape, strides, numel)), ("a/data/0", bytes(16))])
    _refused(path, "holds no weights: it holds a (tensor|storage)")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (_Call(bytearray, 10**9), "the name '__builtin__.bytearray'"),
        (_Call(torch.Tensor, 10**9), "the name 'torch.*Tensor'"),
        (argparse.Namespace(lr=0.1), "the name 'argparse.Namespace'"),
        (_Call(torch.FloatStorage, 10**9), "FloatStorage of"),
        ({((),) * 3: 1}, "a key that is of type tuple"),
        ([_Call(__import__("_codecs").encode, "x" * 10_000, "latin1") for _ in range(3)], "encoded again and again"),
    ],
)
def test_what_takes_memory_or_time_for_a_claim_is_refused(tmp_path, value, words):
    text = "x" * 10_000  # one string, encoded several times
    if isinstance(value, list):
        value = [_Call(__import__("_codecs").encode, text, "latin1") for _ in range(3)]
    _refused(_with_pickle(tmp_path, pickle.dumps({"w": value}, 2)), words)


def test_an_old_file_that_lies_of_its_storages_is_refused(tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"w": torch.arange(4.0)}, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    count = whole.rindex((4).to_bytes(8, "little"))
    for changed in (
        whole[:count] + (10**9).to_bytes(8, "little") + whole[count + 8 :],
        whole[:-1],
        whole + b"more",
        whole.replace(b"K\x04N", b"K\x44N"),
    ):
        assert changed != whole
        path.write_bytes(changed)
        _refused(path, "holds no weights: it (is damaged|holds)")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_any_changed_bytes_give_weights_or_one_line(tmp_path, is_zip):
    """A modest fuzz: bytes changed, cut out and repeated; with an archive, checksums find what the reader does not."""
    path, chance = tmp_path / "w.pt", random.Random(1)
    torch.save({"state_dict": {"a": torch.randn(5, 3), "b": torch.arange(4)}, "epoch": 3}, path,
               _use_new_zipfile_serialization=is_zip)  # fmt: skip
    whole, lines = path.read_bytes(), []
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(changed))
            kind = chance.randrange(3)
            if kind == 0:
                changed[place] = chance.randrange(256)
            elif kind == 1:
                del changed[place : place + chance.randrange(1, 9)]
            else:
                changed[place:place] = changed[place : place + chance.randrange(1, 99)]
        path.write_bytes(changed)
        try:
            read_weights(path)
        except WeightsError as error:
            lines.append(str(error))
    assert len(lines) > 100
    assert all(line.isprintable() for line in lines)


def test_a_safetensors_file_whose_header_is_huge_is_refused(tmp_path):
    path = tmp_path / "w.safetensors"
    text = b"{" + b",".join(b'"%07d":{}' % i for i in range(600_000)) + b"}"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    _refused(path, "more than 1,000,000 values", most=30_000_000)


def test_names_out_of_a_file_are_shown_and_not_obeyed(tmp_path):
    torch.save({"\x1b[2J\nowned": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(WeightsError) as caught:
        load_weights_(model(), tmp_path / "w.pt")
    assert str(caught.value).isprintable()
    assert r"such as '\x1b[2J\nowned'" in str(caught.value)
