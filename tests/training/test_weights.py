"""Starting from weights that somebody else trained."""

import io
import os
import pickle
import random
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.training.weights import WeightsError, load_weights_, read_weights, sha256
from decomposable_edge.sizing.plans import SizeRequest
from refusals import Saying, refused


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
    with refused(kind=dn.DecomposableError, path=tmp_path / "small.safetensors"):
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
    with refused(kind=WeightsError, path=tmp_path / name):
        load_weights_(target, _spoilt(tmp_path, name, content))
    assert same(target, model())


def test_a_truncated_file_is_one_clear_line(tmp_path):
    torch.save(model().state_dict(), tmp_path / "weights.pt")
    whole = (tmp_path / "weights.pt").read_bytes()
    with refused(kind=WeightsError, path=tmp_path / "cut.pt", reason=Saying("it is damaged")):
        read_weights(_spoilt(tmp_path, "cut.pt", whole[: len(whole) // 2]))


def test_code_in_a_file_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"state_dict": {"0.weight": Attack()}}, tmp_path / "weights.pt")
    with refused(kind=WeightsError, reason=Saying(r"it names posix\.mkdir; allowed: tensors")):
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
    with refused(kind=WeightsError, path=tmp_path / "weights.pt", reason=Saying(words)):
        read_weights(tmp_path / "weights.pt")


def test_a_missing_file():
    with refused(kind=WeightsError, reason=Saying("^no such file; allowed: ")):
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
    with refused(kind=WeightsError, path=tmp_path / "weights.pt", reason=Saying(words)):
        load_weights_(target, tmp_path / "weights.pt")
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


def _claiming(shape, strides, numel=4):
    """The pickle of a state dict whose one tensor claims this of a storage of 16 bytes."""

    class Call:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Pickler, 0, shape, strides, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if value is Pickler else None

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"w": Call()})
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("shape", "strides", "numel"),
    [
        ((10**9,), (0,), 4),  # one number, said to be a thousand million
        ((10**9,), (1,), 4),
        ((2,), (4,), 4),
        ((-1,), (1,), 4),
        ((4,), (1,), 10**12),
        ((4,), (1,), -1),
    ],
)
def test_a_tensor_that_claims_more_than_is_stored_is_none_of_the_models(tmp_path, shape, strides, numel):
    path, target = tmp_path / "x.pt", nn.ParameterDict({"w": nn.Parameter(torch.ones(4))})
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {"data.pkl": _claiming(shape, strides, numel), "data/0": bytes(16)}.items():
            archive.writestr(f"a/{name}", content)
    with refused(kind=WeightsError, path=path):
        load_weights_(target, path)
    assert target["w"].tolist() == [1] * 4


@pytest.mark.parametrize("odd", [torch.ones(2).to_sparse(), torch.empty(2, device="meta")], ids=["sparse", "meta"])
def test_a_tensor_without_its_numbers_is_refused(tmp_path, odd):
    torch.save({"w": odd}, tmp_path / "x.pt")
    with refused(kind=WeightsError, path=tmp_path / "x.pt", reason=Saying("a dict of other things")):
        read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "old"])
def test_any_changed_bytes_give_weights_or_one_line(tmp_path, is_zip):
    """A modest fuzz: bytes changed, cut out and repeated."""
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
    with refused(kind=WeightsError, path=path, reason=Saying("more than 1,000,000 values")):
        read_weights(path)


def test_names_out_of_a_file_are_shown_and_not_obeyed(tmp_path):
    torch.save({"\x1b[2J\nowned": torch.zeros(1)}, tmp_path / "w.pt")
    with pytest.raises(WeightsError) as caught:
        load_weights_(model(), tmp_path / "w.pt")
    assert str(caught.value).isprintable()
    assert r"such as '\x1b[2J\nowned'" in str(caught.value)
