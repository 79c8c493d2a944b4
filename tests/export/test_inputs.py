"""Every input of the example batch is exported under its own name, and the check looks at every one of them."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import decomposable as dn
from decomposable.export import checking, one_size
from decomposable.export.any_size import save_with_graph
from decomposable.export.checking import trials_of
from decomposable.export.interface import MOST_BATCH, MOST_NUMBERS, Interface, interface_of, resized
from decomposable.export.program import ExportError, to_program
from decomposable_edge import AnySizeSession
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.feeding import example

# Few sizes are calibrated here, on purpose: what a size far from them does is looked at in test_grid.py.
pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation was calibrated")

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

LENGTH, TOKENS, MOST = 6, 40, 24


@dataclass
class Output:
    hidden: Tensor
    pooled: Tensor
    nothing: Tensor | None = None


class Encoder(nn.Module):
    """An encoder of the make of BERT: tokens and places, attention that a mask keeps from padding, a pooled output."""

    def __init__(self, width=8):
        super().__init__()
        self.tokens, self.types = nn.Embedding(TOKENS, width), nn.Embedding(2, width)
        self.register_buffer("places", torch.randn(1, MOST, width))
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm, self.pool = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, labels=None, as_tuple=False):
        h = self.tokens(input_ids) + self.places[:, : input_ids.shape[1]]
        if token_type_ids is not None:
            h = h + self.types(token_type_ids)
        scores = self.query(h) @ self.key(h).transpose(1, 2)
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None].float()) * -1e9
        h = self.norm(h + scores.softmax(-1) @ self.value(h))
        output = Output(h, torch.tanh(self.pool(h[:, 0])))
        return (output.hidden, output.pooled) if as_tuple else output


def batch_of(rows=2, length=LENGTH):
    """As a user has it at hand: no row is padded."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, TOKENS, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones(rows, length, dtype=torch.int64)}


def padded_of(rows=3, length=LENGTH):
    batch = batch_of(rows, length)
    batch["attention_mask"][1:, length // 2 :] = 0
    return batch


def whole(net, batch):
    return net(**batch)


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    return dn.decompose(Encoder().eval(), batch_of(), forward=whole).eval()


SIZE = {"macs": 0.7}
BOTH = {"input_ids": {1: "length"}, "attention_mask": {1: "length"}}


def export(net, path, kind, **options):
    """Export at a size, and give what runs the file at that size."""
    if kind == "onnx":
        report = dn.export_onnx(net, path.with_suffix(".onnx"), **SIZE, **options)
        session = ort.InferenceSession(report.path, providers=["CPUExecutionProvider"])
        return report, lambda batch: session.run(None, {name: x.numpy() for name, x in batch.items()})
    if kind == "torch":
        report = dn.export_torch(net, path.with_suffix(".pt2"), **SIZE, **options)
        module = torch.export.load(report.path).module()
        return report, lambda batch: [y.detach().numpy() for y in module(**batch).values() if y is not None]
    report = save_with_graph(net, path.with_suffix(".safetensors"), **options)
    device = AnySizeSession(report.path, threads=1)
    device.resize(**SIZE, align=1)
    return report, lambda batch: device.run({name: x.numpy() for name, x in batch.items()})


def expected(net, batch):
    with torch.no_grad():
        output = net.extract(net.plan(**SIZE)).eval()(**batch)
    return [output.hidden.numpy(), output.pooled.numpy()]


def assert_same(found, wanted):
    for y, z in zip(found, wanted, strict=True):
        np.testing.assert_allclose(y, z, atol=1e-4)


@pytest.mark.parametrize("kind", ["onnx", "torch", "any-size"])
def test_every_input_is_exported_under_its_own_name_and_a_padded_row_is_right(net, kind, tmp_path):
    report, run = export(net, tmp_path / "net", kind)
    assert list(report.inputs) == ["input_ids", "attention_mask"]
    assert report.outputs == ("hidden", "pooled")
    assert (report.left_out, report.unvaried) == ((), ())
    assert_same(run(padded_of()), expected(net, padded_of()))
    assert_same(run(batch_of(1)), expected(net, batch_of(1)))
    ignored = padded_of() | {"attention_mask": torch.ones(3, LENGTH, dtype=torch.int64)}
    assert np.abs(run(padded_of())[0] - run(ignored)[0]).max() > 1e-3  # the mask does something
    assert "inputs: input_ids, attention_mask" in str(report)
    with pytest.raises(Exception, match=r"(?i)length|shape|size|dim|expected|allowed"):
        run(padded_of(3, LENGTH + 1))  # by default only the batch varies


@pytest.mark.parametrize(
    "kind", ["onnx", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("torch", "any-size"))]
)
def test_dynamic_names_further_axes_that_vary(net, kind, tmp_path):
    report, run = export(net, tmp_path / "net", kind, dynamic=BOTH)
    for rows, length in ((1, LENGTH), (3, 2), (2, 11), (4, MOST)):
        assert_same(run(padded_of(rows, length)), expected(net, padded_of(rows, length)))
    assert report.lengths["length"][0] == LENGTH
    assert len(set(report.lengths["length"])) > 1  # another length was tried
    assert f"length of {', '.join(map(str, sorted(report.lengths['length'])))}" in str(report)
    uneven = padded_of() | {"attention_mask": torch.ones(3, LENGTH - 1, dtype=torch.int64)}
    with pytest.raises(Exception, match=r"(?i)length|size|dim"):  # axes of one name are of one length
        run(uneven)
    if kind == "torch":
        return
    model = onnx.load(report.path) if kind == "onnx" else onnx.load_model_from_string(net.graph.content)
    ids, mask = (each for each in model.graph.input if each.name in BOTH)
    shapes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in (ids, mask)]
    assert shapes == [["batch", "length"]] * 2
    if kind == "any-size":
        device = AnySizeSession(report.path, threads=1)
        with pytest.raises(InvalidArgumentError, match=r"'length' is 6 in 'input_ids' and 5 in 'attention_mask'"):
            device.run({name: x.numpy() for name, x in uneven.items()})
        assert device.measure(sizes=[0.7], seconds=0).entries[0].batch == 1  # at the length of the example
        made = example(device.inputs, 50, {"length": LENGTH})
        assert 1 < made["input_ids"].max() < TOKENS  # tokens that the network has
        assert set(made["attention_mask"].flatten()) == {0, 1}


@pytest.mark.slow
def test_the_height_and_the_width_of_images_may_vary_at_every_size(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2)).eval()
    net = dn.decompose(model, torch.zeros(1, 3, 12, 12))
    net.calibrate_([torch.randn(16, 3, 12, 12)], sizes=[0.4, 0.6])
    net.save(tmp_path / "net.safetensors", onnx=True, dynamic={"input": {2: "height", 3: "width"}})
    session, x = AnySizeSession(tmp_path / "net.safetensors", threads=1), torch.randn(2, 3, 17, 9)
    assert session.inputs[0].shape == ("batch", 3, "height", "width")
    session.resize(macs=0.5, align=1)
    net.resize_(macs=0.5)
    with torch.no_grad():
        np.testing.assert_allclose(session.run(x.numpy()), net(x), atol=1e-4)


# --- the check -----------------------------------------------------------------------------------------------------


def test_the_check_runs_the_example_itself_another_size_and_rows_that_differ_in_every_input(net, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(one_size, "largest_difference", lambda one, other, batches: seen.extend(batches) or 0.0)
    example = batch_of(3)
    report = dn.export_onnx(net, tmp_path / "net.onnx", example_input=example, dynamic=BOTH)
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in example.items())
    counts = [len(batch["input_ids"]) for batch in seen]
    assert {1, 2, 3, 5} == set(counts) == set(report.batches)
    varied = next(batch for batch in seen if (batch["attention_mask"] == 0).any())
    assert all((varied[name] != resized(example, {}, 5, {})[name]).any(1).all() for name in example)
    assert (varied["attention_mask"].sum(1) > 0).all()
    assert {batch["input_ids"].shape[1] for batch in seen} == set(report.lengths["length"])


@pytest.mark.parametrize("name", [pytest.param("input_ids", marks=pytest.mark.slow), "attention_mask"])
def test_a_file_that_ignores_one_of_its_inputs_is_refused(net, name, tmp_path, monkeypatch):
    """The old mistake: on the example itself nothing is to be seen of it."""
    honest, example = checking.onnx_runner, batch_of()

    def ignoring(model):
        return lambda batch: honest(model)({**batch, name: resized(example, {}, len(batch[name]), {})[name]})

    monkeypatch.setattr(one_size, "onnx_runner", ignoring)
    with pytest.raises(ExportError, match=r"differ from PyTorch's by .*nothing was written"):
        dn.export_onnx(net, tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


def test_made_up_rows_differ_too_where_no_example_is_at_hand(net):
    trials = trials_of(net, Interface(call=net.call), None)
    assert trials.example is None
    assert all(len({tuple(row) for row in trials.batches[-1][name].tolist()}) == 5 for name in net.inputs)
    assert int(trials.batches[-1]["input_ids"].max()) < TOKENS


def test_an_input_of_which_no_other_values_run_is_reported(tmp_path):
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.linear = nn.Embedding(1, 4), nn.Linear(4, 4)

        def forward(self, x, kind):
            return self.linear(x + self.table(kind))

    example = (torch.randn(2, 4), torch.zeros(2, dtype=torch.int64))
    one = dn.decompose(One().eval(), example, forward=lambda n, b: n(*b))
    assert one.inputs["kind"].values == (0, 0)  # safe to be made up
    trials = trials_of(one, Interface(call=one.call), one._rows)
    assert trials.unvaried == ("kind",)


# --- how inputs are found ------------------------------------------------------------------------------------------


def taken(forward, batch, model=None):
    return dn.decompose((model or Encoder()).eval(), batch, forward=forward)


def test_positional_inputs_have_the_names_of_the_parameters():
    batch = tuple(padded_of().values())
    net = taken(lambda n, b: n(b[0], b[1]), batch)
    assert list(net.inputs) == ["input_ids", "attention_mask"]
    net = taken(lambda n, b: n(b["tokens"], b["padding"]), dict(zip(("tokens", "padding"), batch, strict=True)))
    assert list(net.inputs) == ["tokens", "padding"]
    assert net.inputs["tokens"].shape == (LENGTH,)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *parts, **named):
            return self.linear(sum(parts) + named["more"])

    x = torch.randn(2, 4)
    net = taken(lambda n, b: n(*b[0], more=b[1]), ([x, x], x), Sum())
    assert list(net.inputs) == ["parts_0", "parts_1", "more"]  # one tensor three times is three inputs


def test_a_pair_of_input_and_label_keeps_one_input(tmp_path):
    x, y = torch.randn(3, 6), torch.zeros(3)
    for batch in ((x, y), {"image": x, "label": y}, x):
        net = dn.decompose(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), batch)
        assert list(net.inputs) == ["input"]
        assert net.input.shape == (6,)
    labelled = {**batch_of(), "labels": torch.zeros(2)}
    net = taken(lambda n, b: n(b["input_ids"], b["attention_mask"]), labelled)
    assert list(net.inputs) == ["input_ids", "attention_mask"]


@pytest.mark.parametrize("kind", ["onnx", pytest.param("torch", marks=pytest.mark.slow)])
def test_an_input_that_changes_nothing_is_left_out_and_reported(kind, tmp_path):
    torch.manual_seed(0)
    net = taken(whole, {**batch_of(), "labels": torch.zeros(2, dtype=torch.int64)})
    report, run = export(net, tmp_path / "net", kind)
    assert list(report.inputs) == ["input_ids", "attention_mask"]
    assert report.left_out == ("labels",)
    assert "left out, because nothing that the network gives depends on it: labels" in str(report)
    assert_same(run(padded_of()), expected(net, padded_of()))


@pytest.mark.slow
def test_what_is_always_the_same_is_part_of_the_file_and_what_forward_makes_of_the_output_is_not(tmp_path):
    torch.manual_seed(0)
    net = taken(lambda n, b: n(**b, as_tuple=True)[1].sum(), batch_of())
    report = dn.export_onnx(net, tmp_path / "net.onnx")
    assert report.outputs == ("output_0", "output_1")
    session = ort.InferenceSession(report.path, providers=["CPUExecutionProvider"])
    found = session.run(None, {name: x.numpy() for name, x in padded_of().items()})
    with torch.no_grad():
        assert_same(found, [y.numpy() for y in net(**padded_of(), as_tuple=True)])


def test_a_model_that_takes_the_batch_as_a_dict(tmp_path):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, batch):
            return self.linear(batch["a"]) * batch["b"]

    batch = {"a": torch.randn(2, 4), "b": torch.ones(2, 1), "label": torch.zeros(2)}
    report = dn.export_onnx(Whole(), tmp_path / "net.onnx", example_input=batch, forward=lambda n, b: n(b))
    assert (list(report.inputs), report.left_out) == (["a", "b"], ("label",))


def twice(n, b):
    return n(**b).pooled - n(**b).pooled


@pytest.mark.filterwarnings("ignore:example_input. only the first entry")  # which decompose says already
@pytest.mark.parametrize(
    ("forward", "more", "words"),
    [
        (twice, {}, ["calls the network 2 times"]),
        (lambda n, b: n.tokens(b["input_ids"]), {}, ["does not call the network itself"]),
        (lambda n, b: n(b["input_ids"], b["input_ids"] != 0), {}, ["computes 'attention_mask'"]),
        (lambda n, b: n(b["input_ids"], as_tuple=len(b["input_ids"]) > 1), {}, ["a number or a text from the batch"]),
        (lambda n, b: n(**b), {"as_tuple": True}, ["'as_tuple' is True, which is no tensor"]),
        (lambda n, b: n(**b), {"labels": torch.tensor(3)}, ["'labels' is a single number"]),
        (lambda n, b: n(**b), {"labels": torch.zeros(5)}, ["'labels' has 5 rows where 'input_ids' has 2"]),
        (lambda n, b: n(b["input_ids"], labels={1, 2}), {}, ["a set as 'labels'"]),
        (None, {}, ["only the first entry", "attention_mask"]),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(forward, more, words, tmp_path):
    net = taken(forward, {**batch_of(), **more})
    for call, file in ((dn.export_onnx, "net.onnx"), (save_with_graph, "net.safetensors")):
        with pytest.raises(ExportError) as caught:
            call(net, tmp_path / file)
        assert all(word in str(caught.value) for word in words), caught.value
        assert "allowed: forward=" in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(ExportError):
        dn.export_torch(net, tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"forward": whole, "example_input": {"tokens": torch.zeros(2, 3)}}, ["example_input: forward=", "tokens"]),
        ({"forward": whole}, ["forward=", "example_input="]),
        ({"dynamic": {"ids": {1: "length"}}}, ["no input 'ids'", "input_ids, attention_mask"]),
        ({"dynamic": {"input_ids": {0: "length"}}}, ["no axis 0", "1 to 1", "the batch"]),
        ({"dynamic": {"input_ids": {2: "length"}}}, ["no axis 2", "1 to 1"]),
        ({"dynamic": {"input_ids": {1: "batch"}}}, ["'batch'", "not batch"]),
        ({"dynamic": {"input_ids": {1: "a length"}}}, ["'a length'"]),
        ({"dynamic": {"input_ids": "length"}}, ["'length'", '{1: "length"}']),
        ({"dynamic": ["length"]}, ["dynamic=['length']"]),
        (
            {"dynamic": {"input_ids": {1: "a"}, "attention_mask": {1: "b"}}},
            ["'b' is always as long as 'a'", "one name"],
        ),
        ({"batch": 99_999_999}, ["batch=99999999", f"{MOST_BATCH:,}"]),
        ({"batch": MOST_BATCH + 1}, [f"{MOST_BATCH:,}"]),
    ],
)
def test_a_wrong_call_is_refused_in_one_line(net, options, words, tmp_path):
    with pytest.raises(InvalidArgumentError) as caught:
        dn.export_onnx(net, tmp_path / "net.onnx", **options)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_is_too_large_for_its_samples_is_refused_before_memory_is_taken(tmp_path, monkeypatch):
    x = torch.zeros(1, 3, 64, 64)
    net = dn.decompose(nn.Sequential(nn.Conv2d(3, 4, 3)).eval(), x)
    monkeypatch.setattr(one_size, "trials_of", None)
    most = MOST_NUMBERS // x.numel()
    with pytest.raises(InvalidArgumentError, match=rf"batch={most + 1}; allowed: 1 to {most:,} for samples of 12,288"):
        dn.export_onnx(net, tmp_path / "net.onnx", batch=most + 1)
    assert interface_of(net.call, None, most).batch == most


def test_an_axis_that_has_to_vary_with_others_says_which(net):
    one = interface_of(net.call, {"input_ids": {1: "length"}}, None)
    with pytest.raises(ExportError, match=r"without length, or with that of attention_mask:1, too"):
        to_program(net.extract(), one)


def test_a_length_that_the_model_fixes_is_refused():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(LENGTH, 2)

        def forward(self, x, y):
            return self.linear(x) + y.sum(1, keepdim=True)

    net = taken(lambda n, b: n(*b), (torch.randn(2, LENGTH), torch.randn(2, LENGTH)), Fixed())
    fixed = interface_of(net.call, {"x": {1: "length"}}, None)
    with pytest.raises(ExportError, match=r"the model runs no other 'length' than 6; allowed: dynamic= without it"):
        trials_of(net, fixed, net._rows)
    with pytest.raises(ExportError, match=r"fixes an axis that dynamic= lets vary .*without length"):
        to_program(net.extract(), fixed)
    only = interface_of(net.call, {"y": {1: "length"}}, None)
    assert to_program(net.extract(), only)[1].lengths == {"length": LENGTH}


def test_a_plain_module_with_several_inputs(tmp_path):
    torch.manual_seed(0)
    model = Encoder().eval()
    with pytest.raises(ExportError, match=r"only the first entry .*takes attention_mask, too"):
        dn.export_torch(model, tmp_path / "net.pt2", example_input=batch_of())
    report = dn.export_torch(model, tmp_path / "net.pt2", example_input=batch_of(), forward=whole)
    assert list(report.inputs) == ["input_ids", "attention_mask"]
    found = torch.export.load(report.path).module()(**padded_of())
    torch.testing.assert_close(found["pooled"], model(**padded_of()).pooled)


def test_a_saved_network_knows_its_inputs(net, tmp_path):
    net.save(tmp_path / "net.safetensors")
    loaded = dn.load(tmp_path / "net.safetensors", model=Encoder())
    assert loaded.call == net.call
    assert loaded.input is None
    batch = {**padded_of(), "labels": torch.zeros(3)}
    torch.testing.assert_close(loaded._forward(loaded, batch).pooled, net(**padded_of()).pooled)
    with pytest.raises(InvalidArgumentError, match=r"no entry \['attention_mask'\]"):
        loaded._forward(loaded, {"input_ids": batch["input_ids"]})
    report = dn.export_torch(loaded, tmp_path / "net.pt2")
    assert list(report.inputs) == ["input_ids", "attention_mask"]
    found = torch.export.load(report.path).module()(**padded_of())
    torch.testing.assert_close(found["pooled"], net(**padded_of()).pooled)


def test_one_array_where_there_is_one_input_and_a_dict_where_there_are_several(tmp_path):
    torch.manual_seed(0)
    net = taken(lambda n, b: n(b["pixels"]), {"pixels": torch.randn(2, 6)}, nn.Sequential(nn.Linear(6, 5), nn.Tanh()))
    net.save(tmp_path / "net.safetensors", onnx=True)
    session, x = AnySizeSession(tmp_path / "net.safetensors", threads=1), torch.randn(3, 6)
    with torch.no_grad():
        np.testing.assert_allclose(session.run(x.numpy()), net(x), atol=1e-5)
    np.testing.assert_array_equal(session.run({"pixels": x.numpy()}), session.run(x.numpy()))


def test_bert_itself(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=TOKENS, max_position_embeddings=16, **sizes)
    net = dn.decompose(transformers.BertModel(config).eval(), batch_of(), forward=whole)
    report = dn.export_onnx(net, tmp_path / "net.onnx", dynamic=BOTH)
    assert report.outputs == ("last_hidden_state", "pooler_output")
    session = ort.InferenceSession(report.path, providers=["CPUExecutionProvider"])
    for batch in (padded_of(), padded_of(4, 11)):
        with torch.no_grad():
            wanted = net(**batch)
        assert_same(session.run(None, {name: x.numpy() for name, x in batch.items()}), [y.numpy() for y in wanted[:]])
