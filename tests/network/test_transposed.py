"""Networks that upsample by transposed convolutions: sizes, files, exports and the session on a device."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import decomposable as dn
from decomposable.network.artifact import save_size, size_state_dict
from decomposable_edge import AnySizeSession
from refusals import Saying, refused

SIZES = (0.9, 0.6, 0.4, 0.2)


class UNet(nn.Module):
    """Two levels; most of its MACs are in the decoder."""

    def __init__(self, width=8):
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.wider = nn.ConvTranspose2d(2 * width, width, 3, stride=2, padding=1, output_padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.leave = nn.ConvTranspose2d(width, 4, 2, stride=2)

    def forward(self, x):
        first = self.enter(x).relu()
        inner = self.norm(self.up(self.down(first).relu())).relu()
        return self.leave(self.norm2(self.wider(torch.cat([inner, first], 1))).relu())


def unet():
    torch.manual_seed(0)
    model = UNet()
    for norm in (model.norm, model.norm2):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return model.eval()


def images(count=2):
    return torch.randn(count, 3, 8, 12, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=["spatial", pytest.param("tucker", marks=pytest.mark.slow)])
def net(request):
    return dn.decompose(unet(), example_input=images(), form=request.param)


def macs_of(network, x):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x)
    return counter.get_total_flops() // 2 // len(x)


@pytest.mark.filterwarnings("ignore:.*calibrate")
def test_every_layer_of_a_unet_is_decomposed(net):
    model, x = unet(), images()
    assert net.skipped == {}
    assert {layer.name for layer in net.layers} == {"enter", "down", "up", "wider", "leave"}
    torch.testing.assert_close(net(x), model(x))
    assert net.plan().macs == macs_of(model, x)
    torch.testing.assert_close(net._original.in_factors(net._factors)(x), model(x), rtol=1e-4, atol=1e-5)
    for size in SIZES:
        plan = net.resize_(macs=size)
        assert plan.macs <= size * plan.full_macs
        assert plan.macs == macs_of(net, x) == net.macs_for(x)
        small = net.extract()
        assert torch.equal(small(x), net(x))
        assert small(x).shape == model(x).shape


@pytest.mark.filterwarnings("ignore:.*calibrate")
def test_files_give_the_same_network(net, tmp_path):
    x = images()
    net.save(tmp_path / "net.safetensors")
    for size in SIZES:
        net.resize_(macs=size)
        loaded = dn.load(tmp_path / "net.safetensors", model=UNet())
        loaded.resize_(macs=size)
        assert torch.equal(loaded(x), net(x))
        torch.testing.assert_close(dn.load(tmp_path / "net.safetensors", model=UNet(), macs=size)(x), net(x))
        save_size(net, net.plan(), tmp_path / "size.safetensors")
        assert torch.equal(dn.load(tmp_path / "size.safetensors", model=UNet())(x), net(x))
        state, made = net.extract().state_dict(), size_state_dict(net.artifact(), net.plan())
        assert list(made) == list(state)
        assert all(torch.equal(made[key], state[key]) for key in made)
    wrong = UNet()
    wrong.wider = nn.Conv2d(8, 16, 3, bias=False)  # a weight of the same shape
    with refused("model", Saying("a ConvTranspose2d, the model a Conv2d")):
        dn.load(tmp_path / "net.safetensors", model=wrong)


@pytest.mark.filterwarnings("ignore:.*calibrate")
def test_exports_give_the_same_numbers(net, tmp_path):
    x = images(3)
    net.resize_(macs=0.5)
    dn.export_onnx(net, tmp_path / "one.onnx")
    kinds = [node.op_type for node in onnx.load(tmp_path / "one.onnx").graph.node]
    assert "ConvTranspose" in kinds
    assert "Conv" in kinds
    dn.export_torch(net, tmp_path / "one.pt2")
    net.save(tmp_path / "any.safetensors", onnx=True)
    session = AnySizeSession(tmp_path / "any.safetensors")
    assert session.plan().macs == net.selector.full_plan().macs
    for size in (1.0, *SIZES):
        plan = session.resize(macs=size, align=1)
        assert plan.ranks == net.resize_(macs=size).ranks
        found = session.run(x.numpy())
        np.testing.assert_allclose(found, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_an_order_by_data_is_found_for_transposed_convolutions_too():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(12, 10, 4, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(10, 5),
    ).eval()
    batches = [images(8) for _ in range(2)]
    for criterion in ("loss", "output"):
        net = dn.decompose(model, data=batches, criterion=criterion)
        torch.testing.assert_close(net(images()), model(images()))
        net.resize_(macs=0.5)
        assert torch.isfinite(net(images())).all()


def test_calibration_of_a_decoder():
    net = dn.decompose(unet(), example_input=images())
    net.calibrate_([images(8)])
    net.resize_(macs=0.4)
    assert torch.isfinite(net(images())).all()


def test_the_size_of_the_output_may_be_given():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
            self.up = nn.ConvTranspose2d(8, 3, 3, stride=2, padding=1)

        def forward(self, x):
            return self.up(self.down(x), output_size=x.shape)

    torch.manual_seed(0)
    model = Given().eval()
    net = dn.decompose(model, example_input=images())
    assert net.skipped == {}
    net.resize_(ranks={"up": 4, "down": 4})
    for height, width in ((8, 12), (7, 9)):
        assert net(torch.zeros(1, 3, height, width)).shape == (1, 3, height, width)


def test_grouped_and_depthwise_convolutions_stay_and_count():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.ConvTranspose2d(8, 8, 2, stride=2, groups=4),
    ).eval()
    x = images()
    net = dn.decompose(model, example_input=x)
    assert [layer.name for layer in net.layers] == ["0"]
    assert net.plan().macs == macs_of(model, x)
    assert "depthwise" in net.skipped["1"]
    assert "groups=2" in net.skipped["2"]
    assert "groups=4" in net.skipped["3"]
    smallest = net.resize_(net.selector.smallest_plan())
    assert smallest.macs == macs_of(net, x)
    assert torch.equal(net.extract()[1].weight, model[1].weight)
