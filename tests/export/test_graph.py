"""Modules as ONNX graphs: the same numbers at any batch size, plain names, folded normalisation, nothing private."""

import collections
import logging
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decomposable
from decomposable import models
from decomposable.export import graph
from decomposable.export.interface import Interface
from decomposable.export.program import ExportError
from decomposable.export.quiet import quiet
from decomposable.network.calls import CallSignature, InputSpec
from decomposable_edge.errors import DecomposableError, InvalidArgumentError, MissingExtraError

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

IMAGE = InputSpec(shape=(3, 8, 8), dtype="float32")
VECTOR = InputSpec(shape=(12,), dtype="float32")


def randomised(model, seed=0):
    """Normalisation as after a training: the initial one hides what is left out."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor, low, high in (
                (module.running_mean, -1, 1),
                (module.running_var, 0.5, 2),
                (module.weight, -1.5, 1.5),
                (module.bias, -1, 1),
            ):
                if tensor is not None:
                    tensor.data = torch.rand(tensor.shape, generator=generator) * (high - low) + low
    return model


def to_onnx(module, spec, *, optimize, batch=None):
    return graph.to_onnx(module, Interface(call=CallSignature.with_first(spec), batch=batch), optimize=optimize)[0]


def outputs(model, x):
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"input": x.numpy()})


def ops(model):
    return collections.Counter(node.op_type for node in model.graph.node)


def check(module, spec, *, optimize, batches=(1, 3)):
    """Export, and compare each batch size with the module in eval mode; the graph comes back."""
    made = to_onnx(module, spec, optimize=optimize)
    onnx.checker.check_model(made, full_check=True)
    module.eval()
    for batch in batches:
        x = torch.randn(batch, *spec.shape, generator=torch.Generator().manual_seed(batch))
        x = x if spec.dtype == "float32" else (x > 0).to(getattr(torch, spec.dtype))
        with torch.no_grad():
            wanted = torch.utils._pytree.tree_leaves(module(x))
        for y, y_torch in zip(outputs(made, x), [y for y in wanted if y is not None], strict=True):
            assert y.shape == y_torch.shape
            np.testing.assert_allclose(y, y_torch.numpy(), rtol=1e-4, atol=1e-5)
    return made


def conv(*args, **kwargs):
    return nn.Sequential(nn.Conv2d(3, 4, 3, *args, **kwargs), nn.BatchNorm2d(4), nn.ReLU())


# --- numbers -------------------------------------------------------------------------------------------------------


class ConvUsedTwice(nn.Module):
    """Its output goes into the normalisation and past it."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return y + self.bn(y)


class SharedConv(nn.Module):
    """One weight, two places, each with a normalisation of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.bn2(self.conv(self.bn1(self.conv(x))))


class TiedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.bn1, self.bn2 = nn.BatchNorm1d(12), nn.BatchNorm1d(12)

    def forward(self, x):
        return self.bn2(self.second(self.bn1(self.first(x))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, batch_first=True)

    def forward(self, x):
        return self.layer(x).mean(1)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.linear(self.embedding(x)).sum(1)


IMAGES = {
    "bias": conv(),
    "no_bias": conv(bias=False),
    "string_padding": nn.Sequential(*conv(padding="same", dilation=2, bias=False), nn.Conv2d(4, 4, 3, stride=2)),
    "groups": nn.Sequential(*conv(), nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1, groups=2)),
    "no_norm": nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 3)),
    "norm_first": nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)),
    "norm_later": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.BatchNorm2d(4), nn.MaxPool2d(2)),
    "not_affine": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)),
    "used_twice": ConvUsedTwice(),
    "shared": SharedConv(),
    "n_dimensional": nn.Sequential(nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 7)),
    "transposed": nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.BatchNorm2d(4)),
    "reflect": nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "channels_last": conv().to(memory_format=torch.channels_last),
}
VECTORS = {
    "tied": TiedLinear(),
    "linear": nn.Sequential(nn.Linear(12, 6), nn.BatchNorm1d(6), nn.Dropout(0.9)),
    "linear_no_bias": nn.Sequential(nn.Linear(12, 6, bias=False), nn.BatchNorm1d(6)),
    "pair": nn.Sequential(nn.Linear(12, 3, bias=False), nn.Linear(3, 6), nn.BatchNorm1d(6)),
}
LEFT = {
    "norm_first",
    "norm_later",
    "used_twice",
    "shared",
    "tied",
}  # by whatever can be folded only into what is shared


class Branches(nn.Module):
    """Many networks with one input: one export takes as long as its preparations."""

    def __init__(self, branches):
        super().__init__()
        self.branches = nn.ModuleDict(branches)

    def forward(self, x):
        return {name: branch(x) for name, branch in self.branches.items()}


@pytest.mark.parametrize(("branches", "spec"), [(IMAGES, IMAGE), (VECTORS, VECTOR)])
def test_the_same_numbers_with_normalisation_folded_where_it_can_be(branches, spec):
    made = check(randomised(Branches(branches)), spec, optimize=True)
    assert [value.name for value in made.graph.output] == list(branches)
    norms = [node for node in made.graph.node if node.op_type == "BatchNormalization"]
    assert {node.input[1].split(".")[1] for node in norms} == LEFT & branches.keys()


@pytest.mark.parametrize(
    ("module", "spec"),
    [(Attention(), InputSpec(shape=(6, 8), dtype="float32")), (Embedded(), InputSpec(shape=(6,), dtype="int64"))],
)
def test_attention_and_integers(module, spec):
    check(module, spec, optimize=True)


def test_without_optimising_every_layer_is_there_under_its_name():
    module = randomised(conv())
    made = check(module, IMAGE, optimize=False)
    assert ops(made) == {"Conv": 1, "BatchNormalization": 1, "Relu": 1}
    stored = {w.name: onnx.numpy_helper.to_array(w) for w in made.graph.initializer}
    state = {key: t for key, t in module.state_dict().items() if t.is_floating_point()}
    assert stored.keys() == state.keys()
    for key, tensor in state.items():
        np.testing.assert_array_equal(stored[key], tensor.numpy())


def test_a_network_in_training_is_exported_as_in_eval_and_stays_as_it_is():
    module = nn.Sequential(randomised(conv()), nn.Dropout(0.5)).train()
    before = {key: t.clone() for key, t in module.state_dict().items()}
    made = to_onnx(module, IMAGE, optimize=True)
    assert all(m.training for m in module.modules())
    assert all(torch.equal(t, before[key]) for key, t in module.state_dict().items())
    assert all(p.requires_grad for p in module.parameters())
    x = IMAGE.example(4)
    with torch.no_grad():
        np.testing.assert_allclose(outputs(made, x)[0], module.eval()(x).numpy(), atol=1e-5)


def test_inside_inference_mode():
    with torch.inference_mode():
        check(conv(), IMAGE, optimize=True)


# --- names ---------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """Something made from the input, and a weight whose name is taken."""

    def __init__(self, make):
        super().__init__()
        self.make = make
        self.input, self.output = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x):
        return self.make((x + self.input) * self.output, x)


@pytest.mark.parametrize(
    ("make", "names", "optimize"),
    [
        (lambda y, x: y, ["output"], True),
        (lambda y, x: (y,), ["output"], False),
        (lambda y, x: (y, y, x), ["output_0", "output_1", "output_2"], True),
        (lambda y, x: (y, y, x), ["output_0", "output_1", "output_2"], False),
        (lambda y, x: {"logits": y, "nothing": None, "same": torch.ones(3)}, ["logits", "same"], True),
        (lambda y, x: {"input": y, "output": x}, ["output_0", "output_1"], False),
        (lambda y, x: {"a": y, "b": {"c": x * 2, "d": None}}, ["a", "b.c"], False),
        (lambda y, x: {"a": y, "b": [y, (x * 2, None)]}, ["output_0", "output_1", "output_2"], True),
    ],
)
def test_inputs_and_outputs_are_called_plainly_whatever_the_weights_are_called(make, names, optimize):
    made = check(Returns(make), IMAGE, optimize=optimize)
    assert [value.name for value in made.graph.input] == ["input"]
    assert [value.name for value in made.graph.output] == names


def shape(value):
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def test_the_batch_has_a_name_and_the_rest_is_fixed():
    made = to_onnx(Returns(lambda y, x: (y.flatten(1), torch.cat([x, y]))), IMAGE, optimize=True)
    assert shape(made.graph.input[0]) == ["batch", 3, 8, 8]
    assert [shape(value) for value in made.graph.output] == [["batch", 192], ["2*batch", 3, 8, 8]]


@pytest.mark.slow
def test_nothing_in_it_tells_where_it_was_made():
    for optimize in (True, False):
        made = to_onnx(models.small_cnn(), InputSpec(shape=(1, 8, 8), dtype="float32"), optimize=optimize)
        for weight in made.graph.initializer:
            weight.raw_data = b""  # may have any bytes
        content = made.SerializeToString().replace(b"/shape", b"")  # so onnxscript names the shapes that it folds
        for private in (b"/", b"\\", b".py", b"File ", b"pkg.torch", os.environ.get("USER", "nobody knows").encode()):
            assert private not in content, private
        assert (made.producer_name, made.producer_version) == ("decomposable", decomposable.__version__)
        assert not made.metadata_props


@pytest.mark.slow
def test_control_flow_inside_the_graph_is_cleaned_too():
    class Condition(nn.Module):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y * 2, (x,))

    made = check(Condition(), IMAGE, optimize=False)
    assert ops(made)["If"] == 1
    assert b".py" not in made.SerializeToString()


# --- what cannot be ------------------------------------------------------------------------------------------------


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "kind", "named"),
    [
        (lambda x: x.sum() if x.sum() > 0 else x, ExportError, ["torch.export", "data-dependent"]),
        (lambda x: torch.linalg.svd(x)[1], ExportError, ["no ONNX form", "svd"]),
        (lambda x: (x, x.shape[0]), ExportError, ["int", "tensors"]),
        (lambda x: None, ExportError, ["no tensor"]),
        (lambda x: x @ torch.ones(3, 3), InvalidArgumentError, ["example_input", "(1, 3, 8, 8)"]),
    ],
)
def test_a_model_that_has_no_onnx_form_is_refused_in_one_line(function, kind, named, capfd):
    with pytest.raises(kind) as caught:
        to_onnx(Calls(function), IMAGE, optimize=True)
    assert isinstance(caught.value, DecomposableError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 420
    assert all(word in str(caught.value) for word in named), caught.value
    assert capfd.readouterr() == ("", "")


def test_a_batch_that_the_model_fixes_is_said_and_can_be_given():
    module = Calls(lambda x: F.relu(x.reshape(-1, 3 * 64)[:2] + x.flatten(1)))
    with pytest.raises(ExportError, match=r"fixes the size of the batch .*allowed: batch=1"):
        to_onnx(module, IMAGE, optimize=True)
    made = to_onnx(module, IMAGE, optimize=True, batch=2)
    assert shape(made.graph.input[0]) == [2, 3, 8, 8]
    x = IMAGE.example(2)
    np.testing.assert_allclose(outputs(made, x)[0], module(x).numpy())


def test_more_than_one_file_can_hold_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr(graph, "MOST_BYTES", 1000)
    monkeypatch.setattr(graph, "to_program", None)
    with pytest.raises(ExportError, match=r"1,\d{3} bytes; allowed: at most 1,000"):
        to_onnx(nn.Linear(12, 20), VECTOR, optimize=True)


def test_missing_packages_are_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(MissingExtraError, match=r"onnxscript .*pip install .*'\.\[onnx\]'"):
        to_onnx(nn.Linear(12, 2), VECTOR, optimize=True)


def test_it_says_nothing_and_leaves_warnings_and_logging_as_they_were(capfd):
    before = [(name, list(logging.getLogger(name).handlers)) for name in ("torch", "torch.onnx", "onnxscript")]
    filters = list(warnings.filters)
    to_onnx(conv(), IMAGE, optimize=True)
    assert capfd.readouterr() == ("", "")
    assert warnings.filters == filters
    assert [(name, list(logging.getLogger(name).handlers)) for name, _ in before] == before


def test_what_other_threads_print_is_not_lost(capsys):
    with quiet():
        sys.stdout.write("from the exporter\n")
        other = threading.Thread(target=print, args=["from elsewhere"])
        other.start()
        other.join()
    sys.stdout.write("after\n")
    assert capsys.readouterr().out == "from elsewhere\nafter\n"


@pytest.mark.slow
def test_it_says_nothing_in_a_process_of_its_own():
    code = (
        "from torch import nn; from decomposable.network.calls import CallSignature, InputSpec; "
        "from decomposable.export.graph import to_onnx; from decomposable.export.interface import Interface; "
        "call = CallSignature.with_first(InputSpec(shape=(3,), dtype='float32')); "
        "to_onnx(nn.Linear(3, 2), Interface(call=call), optimize=True)"
    )
    source = str(Path(decomposable.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class Common(nn.Module):
    """What is replaced node by node: normalisation, what works in place, pooling, a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 3, padding=1)
        self.up, self.head, self.active = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Linear(4, 2), nn.ReLU(inplace=True)

    def forward(self, x):
        h = self.active(self.norm(self.a(x)))
        y = self.b(h)
        y += h
        return self.head(F.adaptive_avg_pool2d(self.up(self.active(y)), 1).flatten(1))


class Overwriting(nn.Module):
    """In-place operations that something else sees: a view of what they write over, and its other uses."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x):
        h = self.layer(x)
        h.chunk(2, 1)[0].relu_()
        g = self.layer(h)
        return g.relu_() + g, h


@pytest.mark.parametrize(("module", "spec", "is_spared"), [(Common, IMAGE, True), (Overwriting, VECTOR, False)])
def test_what_need_not_be_traced_again_has_the_same_numbers(module, spec, is_spared, monkeypatch):
    torch.manual_seed(0)
    traced, decompose = [], torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram, "run_decompositions", lambda *given: traced.append(1) or decompose(*given)
    )
    check(randomised(module()), spec, optimize=False)
    assert bool(traced) != is_spared
