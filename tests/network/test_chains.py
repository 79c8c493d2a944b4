"""Layers of other kinds and forms, all the way: decompose, sizes, joint step, calibration, file, ONNX and bundle."""

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.core.distillation import kl_divergence
from decomposable.core.standin import StandIn
from decomposable.network import artifact
from decomposable_edge import errors
from refusals import Saying, refused


class Sounds(nn.Module):
    """One axis, with every option that a convolution has."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv1d(2, 12, 5, stride=2, padding=3, padding_mode="reflect"),
            nn.BatchNorm1d(12),
            nn.ReLU(),
            nn.Conv1d(12, 16, 3, padding=2, dilation=2, bias=False),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Conv1d(16, 16, 3, padding="same", padding_mode="circular"),
            nn.ReLU(),
            nn.Conv1d(16, 8, 1),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.features(x).mean(-1))


class Scans(nn.Module):
    """Three axes, each with geometry of its own."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv3d(2, 8, (1, 3, 3), stride=(1, 2, 1), padding=(0, 1, 1)),
            nn.BatchNorm3d(8),
            nn.ReLU(),
            nn.Conv3d(8, 12, 3, padding=1, padding_mode="replicate", bias=False),
            nn.BatchNorm3d(12),
            nn.ReLU(),
            nn.Conv3d(12, 8, (2, 1, 3), dilation=(1, 1, 2)),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3, 4)))


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(12)
        self.layer4 = nn.Sequential(
            nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, (3, 5), padding="same", dilation=2),
            nn.Conv2d(16, 8, 1),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.layer4(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


KINDS = {
    "one axis": (Sounds, (2, 33), "spatial"),
    "one axis, tucker": (Sounds, (2, 33), "tucker"),
    "three axes": (Scans, (2, 4, 9, 8), "spatial"),
    "three axes, tucker": (Scans, (2, 4, 9, 8), "tucker"),
    "images, tucker": (Images, (3, 12, 13), "tucker"),
    "images, both": (Images, (3, 12, 13), {"layer4.*": "tucker", "*": "spatial"}),
}


pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation")  # most sizes here are not calibrated


@pytest.fixture(params=KINDS)
def made(request):
    """The model, an input, and the network of it."""
    return make(request.param)


def make(kind):
    build, shape, form = KINDS[kind]
    torch.manual_seed(0)
    model = build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean)
    x = torch.randn(4, *shape)
    return model.eval(), x, dn.decompose(model, example_input=x, form=form)


def dense_weights(net):
    """What the size in force computes with: the product of each chain, as torch's own operations make it."""
    found = {}
    for layer in net.layers:
        module = net.module.get_submodule(layer.name)
        found[layer.name] = module.weight.detach() * 1.0
    return found


SIZES = (0.9, 0.6, 0.4, 0.25)


def test_every_convolution_is_decomposed_and_full_size_is_the_model(made):
    model, x, net = made
    assert len(net.layers) == sum(isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear) for m in model.modules())
    assert net.skipped == {}
    with torch.no_grad():
        torch.testing.assert_close(net(x), model(x))


def test_a_size_is_the_model_with_truncated_weights_and_costs_what_is_counted(made):
    model, x, net = made
    net.resize_(ratio=0.999)
    for size in SIZES:
        plan = net.resize_(macs=size)
        assert plan.macs <= size * plan.full_macs
        small = net.extract()
        assert sum(p.numel() for p in small.parameters()) == plan.params
        assert counted_macs(small, x) == plan.macs
        weights = {f"{name}.weight": weight for name, weight in dense_weights(net).items()}
        with torch.no_grad():
            torch.testing.assert_close(net(x), torch.func.functional_call(model, weights, x), rtol=1e-4, atol=1e-5)
    assert any(isinstance(module, StandIn) for module in net.module.modules())


def counted_macs(model, x):
    """Weights times output positions, seen by hooks."""
    total = 0

    def see(module, args, output):
        nonlocal total
        positions = output.numel() // (output.shape[-1] if isinstance(module, nn.Linear) else output.shape[1])
        total += module.weight.numel() * positions // len(x)

    kinds = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear
    hooks = [m.register_forward_hook(see) for m in model.modules() if isinstance(m, kinds)]
    model(x)
    for hook in hooks:
        hook.remove()
    return total


def test_sizes_are_contained_in_larger_ones(made):
    _, _, net = made
    before = None
    for size in SIZES:
        plan = net.plan(macs=size)
        ranks = net.selector.as_array(plan.ranks)
        assert before is None or (ranks <= before).all()
        before = ranks


def test_a_joint_step_and_training(made):
    model, x, net = made
    form = {layer.name: layer.form for layer in net.layers}
    model.train()
    joint = dn.Elastic(model, form=form, example_input=x[:1], steps=6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    y = torch.tensor([0, 1, 2, 3])
    for _ in range(6):
        optimizer.zero_grad()
        joint.backward(forward=lambda net: net(x), loss=lambda out: nn.functional.cross_entropy(out, y))
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in model.parameters())
        optimizer.step()


def test_calibrated_and_saved_it_is_the_same_again_whole_and_in_part(made, tmp_path):
    model, x, net = made
    net.calibrate_([x, x + 0.1])
    net.save(tmp_path / "net.safetensors")
    again = dn.load(tmp_path / "net.safetensors", model=type(model)())
    assert [layer.form for layer in again.layers] == [layer.form for layer in net.layers]
    for size in SIZES:
        assert again.resize_(macs=size) == net.resize_(macs=size)
        with torch.no_grad():
            torch.testing.assert_close(again(x), net(x), rtol=0, atol=0)
            part = dn.load(tmp_path / "net.safetensors", model=type(model)(), macs=size)
            torch.testing.assert_close(part(x), net(x), rtol=1e-5, atol=1e-6)
        state = artifact.size_state_dict(artifact.read(tmp_path / "net.safetensors"), net.plan())
        wanted = net.extract().state_dict()
        assert list(state) == list(wanted)
        assert all(torch.equal(state[key], wanted[key]) for key in wanted)
        artifact.save_size(net, net.plan(), tmp_path / "size.safetensors")
        plain = dn.load(tmp_path / "size.safetensors", model=type(model)())
        with torch.no_grad():
            torch.testing.assert_close(plain.eval()(x), net(x), rtol=0, atol=0)


def test_smaller_sizes_of_a_part_are_those_of_the_whole(made, tmp_path):
    model, x, net = made
    net.calibrate_([x, x + 0.1])
    net.save(tmp_path / "net.safetensors")
    part = dn.load(tmp_path / "net.safetensors", model=type(model)(), macs=0.7)
    part.save(tmp_path / "part.safetensors")
    again = dn.load(tmp_path / "part.safetensors", model=type(model)())
    for size in (0.5, 0.3):
        wanted = net.resize_(macs=size)
        assert part.resize_(macs=size).ranks == again.resize_(macs=size).ranks == wanted.ranks
        with torch.no_grad():
            torch.testing.assert_close(part(x), net(x), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(again(x), part(x), rtol=0, atol=0)


ALL = ("one axis", "three axes, tucker", "images, both")
REST = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in ALL]


@pytest.mark.parametrize("kind", [*ALL, *REST])
def test_it_is_exported_and_bundled(kind, tmp_path):
    pytest.importorskip("onnxruntime")
    from decomposable_edge import AnySizeSession

    _, x, net = make(kind)
    net.calibrate_([x, x + 0.1])
    net.save(tmp_path / "any.safetensors", onnx=True)
    session = AnySizeSession(tmp_path / "any.safetensors", threads=1)
    for size in (1.0, *SIZES):
        plan = net.resize_(macs=size)
        assert session.resize(macs=size, align=1).ranks == plan.ranks
        with torch.no_grad():
            np.testing.assert_allclose(session.run(x.numpy()), net(x).numpy(), rtol=1e-4, atol=1e-4)
    for ratio in (0.95, 0.5):  # literal ranks: some layers hold a truncated weight densely
        plan = net.resize_(ratio=ratio)
        assert session.resize(ratio=ratio, align=1) == plan
        with torch.no_grad():
            np.testing.assert_allclose(session.run(x.numpy()), net(x).numpy(), rtol=1e-4, atol=1e-4)
    net.resize_(macs=0.4)
    dn.export_onnx(net, tmp_path / "small.onnx")


def test_given_ranks_and_what_runs_densely(made):
    _, x, net = made
    first = net.layers[0]
    full = first.full_ranks
    rank = tuple(max(1, f - 1) for f in full)
    plan = net.resize_(ranks={first.name: rank if len(full) > 1 else rank[0]})
    assert plan.runs_as(first.name) in ("dense", "factors")
    stages = [stage.double() for stage in net._factors[first.name]]
    wanted = contracted(stages, rank)
    torch.testing.assert_close(dense_weights(net)[first.name].double(), wanted, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(net(x)).all()


def contracted(stages, ranks):
    """W̃ entry by entry of the kernel: the stages' matrices multiplied."""
    ends = (None, *ranks, None)
    cut = [stage[: ends[i + 1], : ends[i]] for i, stage in enumerate(stages)]
    kernel = torch.broadcast_shapes(*(stage.shape[2:] for stage in cut))
    moved = [stage.expand(*stage.shape[:2], *kernel).movedim((0, 1), (-2, -1)) for stage in cut]
    made = moved[0]
    for stage in moved[1:]:
        made = stage @ made
    return made.movedim((-2, -1), (0, 1))


@pytest.mark.parametrize("kind", ["one axis", "three axes"])
@pytest.mark.parametrize("criterion", ["loss", "output"])
def test_by_data_too(kind, criterion):
    build, shape, form = KINDS[kind]
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(400, *shape).cumsum(dim=-1)  # smooth: of noise data know nothing better
    net = dn.decompose(model, data=[x[:320]], criterion=criterion, form=form)
    assert net.cut_report.kept == "data"
    x = x[320:]
    plain = dn.decompose(model, x, form=form)
    for each in (net, plain):
        each.resize_(macs=0.5)
    with torch.no_grad():
        ours, theirs = (kl_divergence(each(x), model(x)) for each in (net, plain))
    assert ours < theirs


def test_layers_with_several_cuts_are_refused_with_data():
    with refused("form", "tucker", Saying("^'spatial', 'channel', or a criterion"), layer="stem"):
        dn.decompose(Images(), data=[torch.zeros(2, 3, 9, 9)], form="tucker")


@pytest.mark.parametrize("kind", ["images, tucker", "one axis"])
def test_tuned_sizes_and_alignment(kind, tmp_path):
    build, shape, form = KINDS[kind]
    torch.manual_seed(0)
    x = torch.randn(8, *shape)
    net = dn.decompose(build().eval(), x, form=form)
    net.tune_([x], sizes=[0.6, 0.3], steps=2)
    net.save(tmp_path / "net.safetensors")
    again = dn.load(tmp_path / "net.safetensors", model=build())
    for align in (None, "auto", 4):
        assert again.plan(macs=0.5, align=align) == net.plan(macs=0.5, align=align)
    again.resize_(macs=0.4)
    net.resize_(macs=0.4)
    with torch.no_grad():
        torch.testing.assert_close(again(x), net(x), rtol=0, atol=0)


def test_a_file_with_stages_that_cannot_be_is_refused(tmp_path):
    from decomposable.network.file.container import read_container, write_container

    net = dn.decompose(Images(), torch.zeros(1, 3, 9, 9), form="tucker")
    net.save(tmp_path / "net.safetensors")
    description, tensors = read_container(tmp_path / "net.safetensors")
    assert description["layers"][0]["stages"] == [[False, False], [True, True], [False, False]]
    for stages in ([[False, False], [True, True]], [[True, True]] * 3, "tucker", [[1, 0], [0, 1], [0, 0]], []):
        changed = [{**entry} for entry in description["layers"]]
        changed[0]["stages"] = stages
        write_container(tmp_path / "bad.safetensors", {**description, "layers": changed}, tensors)
        with pytest.raises(errors.ArtifactError):
            dn.load(tmp_path / "bad.safetensors", model=Images())
