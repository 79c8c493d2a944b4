"""Starting from weights that somebody else trained."""

import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import decomposable as dn
from decomposable import models
from decomposable.weights import WeightsError, load_weights_, read_weights, sha256


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
    from decomposable import artifact

    net = dn.decompose(model(), example_input=torch.zeros(1, 1, 6, 6))
    net.save(tmp_path / "network.safetensors")
    contents = artifact.read(tmp_path / "network.safetensors")
    artifact.save_size(contents, contents.selector.choose(ratio=0.5), tmp_path / "small.safetensors")
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
    with pytest.raises(WeightsError, match="damaged, or holds more than tensors"):
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
