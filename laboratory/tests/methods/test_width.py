import copy
import math

import pytest
import torch
import torch.nn.functional as F

from decomposable import models
from decomposable.core.tracing import trace
from decomposable.network.file.container import read_container
from decomposable.recipes.settings import Settings
from decomposable.training import experiment, methods
from decomposable.training.devices import seed_everything
from decomposable.training.methods.base import CalibrationData
from decomposable.training.methods.flat import with_overrides
from decomposable_lab.methods.sized import restored
from decomposable_lab.methods.width import METHOD

SETTINGS = with_overrides(Settings(), method="width", width=0.5)
EXAMPLE = torch.zeros(1, 1, 8, 8)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def material():
    batches = [(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))) for _ in range(3)]
    return CalibrationData(
        example_input=EXAMPLE, calibration=batches, loss=lambda net, b: F.cross_entropy(net(b[0]), b[1])
    )


def network(settings=SETTINGS, *, is_trained=False):
    return METHOD.network(models.small_cnn(), EXAMPLE, settings, is_trained=is_trained)


def test_the_network_is_plain_and_narrow():
    net = network()
    expected = models.small_cnn([16, 32, 32, 32, 32])
    assert [tuple(t.shape) for t in net.state_dict().values()] == [
        tuple(t.shape) for t in expected.state_dict().values()
    ]
    assert list(net.state_dict()) == list(expected.state_dict())
    assert net(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_fresh_weights_fit_the_narrower_layers_and_trained_ones_are_cut():
    model = models.small_cnn()
    for is_trained, gain in ((True, 1.0), (False, math.sqrt(2))):
        net = METHOD.network(model, EXAMPLE, SETTINGS, is_trained=is_trained)
        torch.testing.assert_close(net[0].weight, model[0].weight[:16])
        torch.testing.assert_close(net[3].weight, model[3].weight[:32, :16] * gain)
        torch.testing.assert_close(net[-1].bias, model[-1].bias * gain)


def test_width_one_is_the_plain_network():
    settings = with_overrides(Settings(), method="width", width=1.0)
    net = network(settings)
    torch.manual_seed(0)
    model = models.small_cnn()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), model.parameters(), strict=True))


def test_its_one_size():
    net = network()
    sized = METHOD.sized(net, material(), SETTINGS)
    (size,) = sized.sizes
    seen = trace(net, EXAMPLE)
    assert size.macs == sum(module.weight.numel() * n for module, n in seen.outputs.items())
    assert size.params == sum(p.numel() for p in net.parameters())
    assert size.full_params == sum(p.numel() for p in models.small_cnn().parameters())
    assert 0.2 < size.macs_fraction < 0.3
    assert (size.name, size.value) == ("width 0.5", 0.5)
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(sized.eval()(x), net.eval()(x))


def test_one_training_for_each_width():
    trainings = METHOD.trainings(with_overrides(Settings(), compare_widths=(0.75, 0.5)))
    assert [(t.curve, t.folder, t.settings) for t in trainings] == [
        ("width", "0.75", {"width": 0.75}),
        ("width", "0.5", {"width": 0.5}),
    ]


def test_a_file_of_it(tmp_path):
    settings = with_overrides(Settings(), method="width", width=0.37, width_multiple=2)
    net = network(settings).train()
    net(torch.randn(8, 1, 8, 8))
    sized = METHOD.sized(net, material(), settings).eval()
    sized.save(tmp_path / "net")
    description, tensors = read_container(tmp_path / "net")
    other, build = METHOD.rebuilt(models.small_cnn(), EXAMPLE, Settings(), description["structure"])
    again = restored(tmp_path / "net", description, tensors, other, build).eval()
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(again(x), sized(x))
    assert again.sizes == sized.sizes
    assert again.module[0].out_channels == 10  # 0.37 of 32 is 11


def test_it_learns():
    net, (x, y) = network().train(), (torch.randn(32, 1, 8, 8), torch.randint(10, (32,)))
    step, optimizer = METHOD.step(net, SETTINGS), torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        losses.append(float(step.backward(lambda net: F.cross_entropy(net(x), y))["loss"]))
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_copy_of_the_sizes_has_a_network_of_its_own():
    sized = METHOD.sized(network(), material(), SETTINGS)
    twin = copy.deepcopy(sized).double()
    assert twin.module[0].weight.dtype == torch.float64
    assert sized.resize_(sized.plan())
    assert sized.module[0].weight.dtype == torch.float32


def test_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setitem(methods.METHODS, "width", METHOD)
    record = experiment.train(
        "digits", out=tmp_path / "run", device="cpu", method="width", width=0.5, epochs=1, train_images=200
    )
    (row,) = record["sizes"]
    assert 0.2 < row["macs_fraction"] < 0.3
    assert row["accuracy"] > 5


def test_resuming_makes_the_same_network():
    states = []
    for _ in range(2):
        seed_everything(3)
        states.append(network().state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))
