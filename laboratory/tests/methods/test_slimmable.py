import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from decomposable import models
from decomposable.network.file.container import read_container
from decomposable.recipes.settings import Settings
from decomposable.training import experiment, methods
from decomposable.training.loop import parameter_groups
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.methods.sized import restored
from decomposable_lab.methods.slimmable import METHOD, SlimmableSettings

SETTINGS = with_overrides(Settings(), method="slimmable", widths=(0.25, 0.5, 0.75, 1.0))
EXAMPLE = torch.zeros(1, 1, 8, 8)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def batch():
    return torch.randn(16, 1, 8, 8), torch.randint(10, (16,))


def make(settings=SETTINGS, model=None):
    return METHOD.network(model or models.small_cnn(), EXAMPLE, settings, is_trained=False)


def loss_of(batch):
    return lambda net: F.cross_entropy(net(batch[0]), batch[1])


def material():
    return CalibrationData(example_input=EXAMPLE, calibration=[], loss=lambda net, b: F.cross_entropy(net(b[0]), b[1]))


def gradients(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def test_width_one_is_the_plain_network(batch):
    plain = models.small_cnn().train()
    network = make(with_overrides(Settings(), widths=(1.0,)), copy.deepcopy(plain)).train()
    loss = loss_of(batch)(plain)
    loss.backward()
    values = METHOD.step(network, with_overrides(Settings(), widths=(1.0,))).backward(loss_of(batch))
    assert list(values) == ["loss"]
    assert torch.equal(values["loss"], loss)
    for (name, p), (_, q) in zip(plain.named_parameters(), network.model.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    for (name, p), (_, q) in zip(plain.named_buffers(), network.model.named_buffers(), strict=True):
        assert torch.equal(p, q), name
    assert torch.equal(network.eval()(batch[0]), plain.eval()(batch[0]))


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_the_gradient_is_that_of_all_widths(batch, kind):
    settings = with_overrides(Settings(), widths=(0.5, 1.0, 0.25), width_loss=kind)
    network = make(settings).train()
    by_hand = copy.deepcopy(network)
    values = METHOD.step(network, settings).backward(loss_of(batch))
    assert list(values) == ["loss", "loss_0.5", "loss_0.25"]
    losses = [loss_of(batch)(by_hand.at(width)) for width in (1.0, 0.5, 0.25)]
    total = sum(losses) / 3 if kind == "mean" else sum(losses)
    total.backward()
    torch.testing.assert_close(list(values.values()), [loss.detach() for loss in losses])
    ours, theirs = gradients(network), gradients(by_hand)
    assert ours.keys() == theirs.keys() == dict(network.named_parameters()).keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], msg=name)


def test_every_width_updates_its_own_statistics_only(batch):
    network = make().train()
    for width in (1.0, 0.75, 0.25):
        before = copy.deepcopy(network.state_dict())
        with torch.no_grad():
            network.at(width)(batch[0])
        changed = {name for name, tensor in network.state_dict().items() if not torch.equal(tensor, before[name])}
        prefix = {1.0: "model.", 0.75: "norms.0.", 0.25: "norms.2."}[width]
        counted = {name for name in before if name.startswith(prefix) and "num_batches" in name}
        assert counted
        assert counted <= changed
        assert all(name.startswith(prefix) for name in changed)


def test_every_width_trains_its_own_normalisation_only(batch):
    network = make().train()
    loss_of(batch)(network.at(0.5)).backward()
    norms = {name for name in gradients(network) if name.startswith("norms.")}
    assert norms == {name for name, _ in network.named_parameters() if name.startswith("norms.1.")}
    touched = {name for name in gradients(network) if name.startswith("model.")}
    assert touched == {f"model.{i}.weight" for i in (0, 3, 7, 10, 14, 19)} | {"model.19.bias"}


def test_a_width_is_a_network_with_sliced_kernels_and_those_norms(batch):
    network = make().train()
    optimizer, step = torch.optim.SGD(network.parameters(), lr=0.1), METHOD.step(network, SETTINGS)
    for _ in range(3):
        optimizer.zero_grad()
        step.backward(loss_of(batch))
        optimizer.step()
    expected = models.small_cnn([8, 16, 16, 16, 16])
    norms = iter(network.norms[2])
    for ours, theirs in zip(expected, network.model, strict=True):
        if isinstance(ours, nn.BatchNorm2d):
            ours.load_state_dict(next(norms).state_dict())
        elif isinstance(ours, nn.Conv2d | nn.Linear):
            part = {k: theirs.state_dict()[k][tuple(map(slice, v.shape))] for k, v in ours.state_dict().items()}
            ours.load_state_dict(part)
    sized = METHOD.sized(network, material(), SETTINGS)
    sized.resize_(sized.sizes[-1])
    torch.testing.assert_close(sized.eval()(batch[0]), expected.eval()(batch[0]))
    assert [size.name for size in sized.sizes] == ["width 1", "width 0.75", "width 0.5", "width 0.25"]
    for size in sized.sizes:
        sized.resize_(size)
        assert size.params == sum(p.numel() for p in sized.module.parameters())
    assert sized.sizes[0].macs_fraction == 1


def test_kernels_get_weight_decay_and_all_parameters_are_stepped():
    network = make()
    decayed, others = (group["params"] for group in parameter_groups(network, 5e-4))
    kernels = {m.weight for m in network.model.modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    assert set(decayed) == kernels
    assert len(decayed) + len(others) == len(list(network.parameters())) == 17 + 3 * 10


def test_it_goes_on_from_a_state_dict(batch):
    network = make().train()
    METHOD.step(network, SETTINGS).backward(loss_of(batch))
    torch.manual_seed(7)
    other = make().train()
    other.load_state_dict(network.state_dict())
    for width in SETTINGS.of(SlimmableSettings).widths:
        assert torch.equal(other.at(width)(batch[0]), network.at(width)(batch[0]))


def test_a_file_of_it(tmp_path, batch):
    settings = with_overrides(Settings(), widths=(0.37, 1.0), width_multiple=2)
    network = make(settings).train()
    METHOD.step(network, settings).backward(loss_of(batch))
    sized = METHOD.sized(network, material(), settings).eval()
    sized.save(tmp_path / "net")
    description, tensors = read_container(tmp_path / "net")
    other, build = METHOD.rebuilt(models.small_cnn(), EXAMPLE, Settings(), description["structure"])
    again = restored(tmp_path / "net", description, tensors, other, build).eval()
    assert again.sizes == sized.sizes
    for size in sized.sizes:
        sized.resize_(size)
        again.resize_(size)
        assert torch.equal(again(batch[0]), sized(batch[0]))


def test_residual_networks_and_channels_last():
    x, y = torch.randn(4, 3, 16, 16).to(memory_format=torch.channels_last), torch.arange(4)
    model = models.resnet20().to(memory_format=torch.channels_last)
    network = METHOD.network(model, x[:1], SETTINGS, is_trained=False).train()
    values = METHOD.step(network, SETTINGS).backward(lambda net: F.cross_entropy(net(x), y))
    assert len(values) == 4
    assert all(p.grad is not None for p in network.parameters())
    sized = METHOD.sized(network, material(), SETTINGS)
    sized.resize_(macs=0.3)
    assert sized.plan().value == 0.5
    assert sized.module.layer1[0].conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_copy_of_the_sizes_has_a_network_of_its_own(batch):
    sized = METHOD.sized(make(), material(), SETTINGS).eval()
    twin = copy.deepcopy(sized).double()
    for size in sized.sizes:
        twin.resize_(size)
        sized.resize_(size)
        torch.testing.assert_close(twin(batch[0].double()).float(), sized(batch[0]))


@pytest.mark.parametrize("widths", [(0.5,), (0.5, 0.5, 1.0)])
def test_widths_without_one_are_refused(widths):
    with pytest.raises(InvalidArgumentError, match=r"widths=0.5.*; allowed: 1 and others"):
        METHOD.check(with_overrides(Settings(), widths=widths), has_init=False)
    METHOD.check(SETTINGS, has_init=False)


def test_all_widths_learn(batch):
    network = make().train()
    step, optimizer = METHOD.step(network, SETTINGS), torch.optim.SGD(network.parameters(), lr=0.2)
    rows = []
    for _ in range(20):
        optimizer.zero_grad()
        rows.append({name: float(value) for name, value in step.backward(loss_of(batch)).items()})
        optimizer.step()
    assert all(rows[-1][name] < 0.5 * rows[0][name] for name in rows[0])


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setitem(methods.METHODS, "slimmable", METHOD)
    record = experiment.train(
        "digits", out=tmp_path / "run", device="cpu", method="slimmable", widths=(0.5, 1), epochs=1, train_images=200
    )
    assert [row["size"] for row in record["sizes"]] == [1.0, pytest.approx(0.25, abs=0.02)]
    assert "loss_0.5" in record["epochs"][0]
