"""Loading a part of a file, loading without the model's code, and loading files from a hostile or careless hand."""

import contextlib
import copy
import hashlib
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import decomposable as dn
from decomposable import artifact, decompose, methods, models
from decomposable.errors import ArtifactError, BudgetError, InvalidArgumentError
from decomposable.methods import Material
from decomposable.models.origin import built_by
from decomposable.models.rebuilding import BUILDERS, rebuilt
from decomposable.recipes import BUILT_IN, cross_entropy, find, make_task
from decomposable.settings import Settings
from decomposable.storage import container
from decomposable.storage.digests import Blocks

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation still has")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Mixed(nn.Module):
    """Layers of every kind: of a stride, shared, in two places, and one that is not decomposed."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 24, (3, 5), stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(24)
        self.one, self.other = nn.Conv2d(24, 24, 1), nn.Conv2d(24, 24, 1)
        self.other.weight = self.one.weight
        self.again = self.other
        self.depthwise = nn.Conv2d(24, 24, 3, groups=24)
        self.last = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 9)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = self.again(torch.relu(self.other(torch.relu(self.one(x)))))
        return self.head(self.last(self.depthwise(x)).mean((2, 3)))


BUILD = {"mixed": Mixed, "resnet20": lambda: models.resnet20(in_channels=3)}
SIZES = [
    *({"macs": part} for part in (0.9, 0.6, 0.35)),
    {"params": 0.7},
    *({"ratio": part} for part in (1.0, 0.9, 0.6, 0.3)),  # at 0.9, W̃ is dense with fewer bases
    {"ranks": {}},
]


def image(count=2):
    return torch.randn(count, 3, 12, 12)


def make(kind="mixed", *, calibrated=True, **options):
    model = BUILD[kind]().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
    net = decompose(model, **{"example_input": image(), **options})
    if calibrated:
        net.calibrate_([image(8), image(8)], [0.35, 0.5, 0.7, 0.9])
    return net


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of several networks."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("networks")
    make().save(folder / "mixed", info={"note": 1})
    make("resnet20").save(folder / "resnet20")
    make(form="channel").save(folder / "channel")
    make(limits={"one": (2, 17)}, min_rank=2).save(folder / "limits")
    make(calibrated=False).to(torch.bfloat16).save(folder / "bfloat16")
    make().to(memory_format=torch.channels_last).save(folder / "channels-last")
    whole = artifact.read(folder / "mixed")
    artifact.shrink(whole, whole.selector.choose(ratio=0.8)).save(folder / "shrunk")
    return folder


FILES = ("mixed", "resnet20", "channel", "limits", "bfloat16", "channels-last", "shrunk")


def model_of(file):
    return BUILD.get(file, Mixed)()


def asked(file, size):
    """The size, unless the network has none so small."""
    try:
        artifact.outline(file).selector.choose(**size)
    except BudgetError:
        pytest.skip("too small for this network")
    return size


# --- one file, any size --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("file", FILES)
def test_a_size_that_is_loaded_is_the_size_that_is_resized_to(folder, file, size):
    path, size = folder / file, asked(folder / file, size)
    whole, part = dn.load(path, model=model_of(file)), dn.load(path, model=model_of(file), **size)
    x = image().to(next(whole.parameters()).dtype)
    assert whole.resize_(**size) == part.plan
    assert_same_values(whole.module.state_dict(), part.module.state_dict())
    assert torch.equal(whole(x), part(x))
    assert_same_tensors(whole.extract().state_dict(), part.extract().state_dict())
    assert part.info == whole.info
    for name, factors in part._factors.items():
        rank = len(factors.first)
        assert torch.equal(factors.first, whole._factors[name].first[:rank])
        assert torch.equal(factors.second, whole._factors[name].second[:, :rank])


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("file", FILES)
def test_a_size_that_is_read_is_what_shrink_makes_of_the_whole(folder, file, size, tmp_path):
    path, size = folder / file, asked(folder / file, size)
    whole = artifact.read(path)
    expected, part = artifact.shrink(whole, whole.selector.choose(**size)), artifact.read(path, **size)
    assert part.plan == expected.plan
    assert_same_tensors(expected.state, part.state)
    assert aliases(expected.state) == aliases(part.state)
    for name, factors in expected.factors.items():
        assert_same_tensors(vars(factors), vars(part.factors[name]))
    # What a file holds is all that there is, so equal files are equal networks.
    expected.save(tmp_path / "expected")
    part.save(tmp_path / "part")
    assert (tmp_path / "expected").read_bytes() == (tmp_path / "part").read_bytes()
    for tensor in (t for f in part.factors.values() for t in (f.first, f.second)):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def assert_same_values(ours, theirs):
    assert list(ours) == list(theirs)
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())


def assert_same_tensors(ours, theirs):
    assert_same_values(ours, theirs)
    for key, tensor in ours.items():
        other = theirs[key]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride()), key


def aliases(state):
    first = {}
    return {key: first.setdefault(id(tensor), key) for key, tensor in state.items()}


def test_a_size_goes_down_and_not_up(folder):
    whole, part = dn.load(folder / "resnet20"), dn.load(folder / "resnet20", macs=0.6)
    assert part.resize_(macs=1.0) == whole.resize_(macs=0.6)
    for macs in (0.5, 0.4, 0.3, 0.2):
        assert part.resize_(macs=macs) == whole.resize_(macs=macs)
        x = image()
        assert torch.equal(part(x), whole(x))
    copied = copy.deepcopy(part).double()
    assert torch.allclose(copied(x.double()).float(), part(x), atol=1e-5)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"macs": 1e-6}, "macs=1e-06 is too small"),
        ({"macs": 0.5, "params": 0.5}, "exactly one of macs, params, ratio or ranks; got macs, params"),
        ({"ranks": {"nowhere": 3}}, "'nowhere' is not a decomposed layer"),
        ({"ratio": 2}, r"ratio=2; allowed: a number in \(0, 1\]"),
    ],
)
def test_a_size_that_cannot_be_is_refused_as_by_resize(folder, size, message):
    for use in (lambda path: dn.load(path, **size), lambda path: artifact.read(path, **size)):
        with pytest.raises(InvalidArgumentError, match=message):
            use(folder / "resnet20")


def test_without_statistics_a_size_warns_as_resize_does(folder, tmp_path):
    decompose(models.small_cnn(), example_input=torch.zeros(1, 1, 8, 8)).save(tmp_path / "net")
    with pytest.warns(UserWarning, match="batch normalisation still has the full network's statistics") as caught:
        dn.load(tmp_path / "net", macs=0.5)
    assert caught[0].filename == __file__


def test_a_file_of_one_size_takes_no_size(folder, tmp_path):
    whole = artifact.read(folder / "mixed")
    artifact.save_size(whole, whole.selector.choose(ratio=0.5), tmp_path / "size")
    with pytest.raises(InvalidArgumentError, match=r"macs=: .*size holds one size only"):
        dn.load(tmp_path / "size", model=Mixed(), macs=0.5)


# --- the bytes that are read ---------------------------------------------------------------------------------------


class Counting:
    """What `safe_open` gives, noting the rows that are asked for and refusing everything else."""

    def __init__(self, opened, read):
        self._opened, self._read = opened, read

    def __enter__(self):
        self._opened = self._opened.__enter__()
        return self

    def __exit__(self, *error):
        return self._opened.__exit__(*error)

    def keys(self):
        return self._opened.keys()

    def metadata(self):
        return self._opened.metadata()

    def get_tensor(self, name):
        tensor = self._opened.get_tensor(name)
        assert tensor.dim() == 0
        return tensor

    def get_slice(self, name):
        return CountingSlice(self._opened.get_slice(name), self._read.setdefault(name, []))


class CountingSlice:
    def __init__(self, part, read):
        self._part, self._read = part, read
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, rows):
        assert isinstance(rows, slice)
        tensor = self._part[rows]
        self._read.append(tensor.nbytes)
        return tensor


@pytest.fixture
def counted(monkeypatch):
    """Bytes read, by the name of the tensor."""
    read = {}
    monkeypatch.setattr(container, "safe_open", lambda *args, **kwargs: Counting(safe_open(*args, **kwargs), read))
    return read


def decaying(model):
    """Weights with the singular values of trained ones, so that the sizes are like those of a trained network."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            matrix = module.weight.data.flatten(1)
            u, s, v = torch.linalg.svd(matrix, full_matrices=False)
            module.weight.data = (u * (s * torch.linspace(1, 0, len(s)) ** 2) @ v).view_as(module.weight)
    return model


@pytest.mark.parametrize("form", ["spatial", "channel"])
@pytest.mark.parametrize("is_decaying", [False, True])
def test_a_quarter_of_the_macs_takes_at_most_two_fifths_of_the_factors(form, is_decaying, tmp_path, counted):
    model = models.resnet20().eval()
    net = decompose(decaying(model) if is_decaying else model, example_input=torch.zeros(1, 3, 32, 32), form=form)
    net.save(tmp_path / "net")
    factors = {
        f"{kind}/{name}": getattr(pair, kind).nbytes
        for name, pair in net._factors.items()
        for kind in ("first", "second")
    }
    small = dn.load(tmp_path / "net", macs=0.25)
    read = {name: sum(parts) for name, parts in counted.items()}
    counted.clear()
    assert sum(read[name] for name in factors) <= 0.4 * sum(factors.values())
    description = container.read_container(tmp_path / "net")[0]
    for name, nbytes in factors.items():
        layer = name.partition("/")[2]
        block, count = description["blocks"][name][0], len(net._factors[layer].first)
        used = min(count, -(-small.plan.ranks[layer] // block) * block)  # the rest of a block, and no more
        assert read[name] == used * nbytes // count
    for name in small.plan.ranks:
        assert (read[f"state/{name}.weight"] > 0) == (name in small.plan.dense)
    counted.clear()
    dn.load(tmp_path / "net")
    assert sum(sum(counted[name]) for name in factors) == sum(factors.values())


def test_listing_sizes_reads_neither_factors_nor_weights(folder, counted):
    outline = artifact.outline(folder / "mixed")
    read = {name for name, parts in counted.items() if sum(parts)}
    assert not [name for name in read if name.startswith(("first/", "second/", "state/", "statistics/mean"))]
    assert outline.selector.choose(macs=0.6) == artifact.read(folder / "mixed").selector.choose(macs=0.6)


def places(content):
    """Where each tensor's bytes are in a file, and its number of rows."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    return {
        name: (start + entry["data_offsets"][0], start + entry["data_offsets"][1], (entry["shape"] or [1])[0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_what_is_not_read_may_be_damaged_and_what_is_read_may_not(folder, tmp_path):
    content, size = (folder / "resnet20").read_bytes(), {"macs": 0.25}
    part = dn.load(folder / "resnet20", **size)
    expected = part.extract().state_dict()
    description = container.read_container(folder / "resnet20")[0]
    spoilt = bytearray(content)
    damaged = 0
    for name, (start, end, rows) in places(content).items():
        kind, _, layer = name.partition("/")
        is_pair = layer.removesuffix(".weight") not in part.plan.dense
        if kind in ("first", "second") and rows:
            block = description["blocks"][name][0]
            start += -(-part.plan.ranks[layer] // block) * block * (end - start) // rows
        elif not (kind == "state" and layer.removesuffix(".weight") in part.plan.ranks and is_pair):
            continue
        spoilt[start:end] = bytes(255 - byte for byte in spoilt[start:end])
        damaged += max(0, end - start)
    assert damaged > 0.6 * len(content)
    (tmp_path / "net").write_bytes(spoilt)
    assert_same_tensors(expected, dn.load(tmp_path / "net", **size).extract().state_dict())
    for use in (lambda: dn.load(tmp_path / "net"), lambda: dn.load(tmp_path / "net", macs=0.7)):
        with pytest.raises(
            ArtifactError, match=r"net: the checksum of tensor '.*' is wrong: it was damaged or changed"
        ):
            use()


def test_every_row_that_is_used_is_verified(folder, tmp_path):
    content = (folder / "mixed").read_bytes()
    plan = artifact.outline(folder / "mixed").selector.choose(macs=0.6)
    for name, (start, end, rows) in places(content).items():
        kind, _, layer = name.partition("/")
        used = plan.ranks[layer] if kind in ("first", "second") else rows
        if kind == "state" and (layer.removesuffix(".weight") in plan.ranks or "running" in layer):
            continue  # W̃ and the statistics of this size take their place
        if layer in ("mean", "var"):
            used = 1
        row = (end - start) // max(1, rows)
        for place in {start, start + used * row - 1}:
            (tmp_path / "net").write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            with pytest.raises(ArtifactError, match=f"the checksum of tensor '{name}' is wrong"):
                dn.load(tmp_path / "net", model=Mixed(), macs=0.6)


def raw_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 3), (3, 0), (1,), (1, 5000), (3, 2), (5000,), (130, 1024), (7, 3, 50, 11)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e5m2])
def test_blocks_of_any_tensor(shape, dtype, tmp_path):
    tensor = (torch.rand(shape) * 9).to(dtype)
    blocks = Blocks.of(tensor)
    assert len(blocks.sha256) <= 64 * 64
    raw = raw_of(tensor).numpy().tobytes()
    step = blocks.rows * (len(raw) // max(1, shape[0] if shape else 1)) or 1
    pieces = [raw[start : start + step] for start in range(0, len(raw), step)]
    assert blocks.sha256 == "".join(hashlib.sha256(piece).hexdigest() for piece in pieces)
    assert len(raw) < 2 * 4096 or len(pieces) > 1 or not shape or shape[0] == 1
    container.write_container(tmp_path / "file", {}, {"x": tensor})
    with container.open_container(tmp_path / "file") as opened:
        assert torch.equal(raw_of(opened.read("x")), raw_of(tensor))
        for rows in {1, 2, 3, blocks.rows, blocks.rows + 1, 10**6} if shape else ():
            part = opened.read("x", rows)
            assert torch.equal(raw_of(part), raw_of(tensor[:rows]))
            assert part.untyped_storage().nbytes() == part.nbytes


def test_the_digests_of_a_large_tensor_are_few_and_a_block_is_a_small_part_of_it():
    blocks = Blocks.of(torch.zeros(2048, 4608))  # a layer of ResNet-50, 36 MB
    assert len(blocks.sha256) // 64 == 64
    assert blocks.rows == 32
    assert blocks.end(1) == 32
    assert blocks.end(33) == 64


# --- without the model's code --------------------------------------------------------------------------------------

ZOO = {
    "vgg15": lambda: models.vgg15(num_classes=3),
    "resnet20": lambda: models.resnet20(num_classes=4, in_channels=1),
    "resnet34": lambda: models.resnet34(num_classes=5),
    "resnet56": lambda: models.resnet56(),
    "resnet50": lambda: models.resnet50(num_classes=7),
    "small_cnn": lambda: models.small_cnn((4, 6, 8), num_classes=3, in_channels=2),
}


def first_layers(module, _):
    return module.weight.numel() < 10_000  # the others take seconds


@pytest.mark.parametrize("name", ZOO)
def test_our_models_are_loaded_without_their_code(name, tmp_path):
    assert ZOO.keys() == BUILDERS.keys()
    with torch.device("meta"):
        model = ZOO[name]()
    model = copy.deepcopy(model.to_empty(device="cpu").eval())
    for i, tensor in enumerate(model.state_dict().values()):
        tensor.fill_(i)
    net = decompose(model, filter_fn=first_layers)
    net.resize_(ratio=0.5)
    net.save(tmp_path / "net")
    artifact.save_size(net, net.plan, tmp_path / "size")
    artifact.shrink(net.artifact(), net.plan).save(tmp_path / "small")
    before = torch.get_rng_state()
    again, size, small = (dn.load(tmp_path / file) for file in ("net", "size", "small"))
    assert torch.equal(torch.get_rng_state(), before)
    extracted = net.extract()
    for module in (again.extract(), size, small.extract()):
        assert_same_tensors(extracted.state_dict(), module.state_dict())
        assert repr(module) == repr(extracted)
        assert not any(t.is_meta for t in (*module.parameters(), *module.buffers()))
    assert built_by(again.module) == built_by(model) == built_by(extracted)
    again.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "net").read_bytes()


@pytest.mark.parametrize("name", ZOO)
def test_our_models_have_no_buffers_that_a_state_dict_leaves_out(name):
    """Such buffers could not be made on the meta device; loading would refuse them."""
    assert not any(module._non_persistent_buffers_set for module in rebuilt(built_by(ZOO[name]())).modules())


@pytest.mark.parametrize("recipe", BUILT_IN)
def test_what_recipes_build_says_how(recipe):
    with torch.device("meta"):
        model = make_task(find(recipe), None, find(recipe).__defaults__[0]).build_model()
    assert repr(rebuilt(built_by(model))) == repr(model)


def replaced_head():
    model = models.resnet20()
    model.linear = nn.Linear(64, 3)
    return model


def other_activation():
    model = models.small_cnn()
    model[2] = nn.Tanh()
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            replaced_head,
            "built by resnet20, changed since: .*'weight' of layer 'linear' the file has a parameter of sh",
        ),
        (other_activation, "built by small_cnn, changed since; allowed: a model as"),
        (lambda: nn.Sequential(models.small_cnn()), "holds weights but not the code that uses them"),
        (lambda: models.small_cnn()[:4], "holds weights but not the code that uses them"),
    ],
)
def test_a_model_that_was_changed_has_to_be_given(build, message, tmp_path):
    net = decompose(build())
    net.save(tmp_path / "net")
    artifact.save_size(net, net.selector.choose(ratio=0.5), tmp_path / "size")
    for file in ("net", "size"):
        with pytest.raises(InvalidArgumentError, match=f"model= is needed: .*{file}.*{message}"):
            dn.load(tmp_path / file)
        dn.load(tmp_path / file, model=build())


NOTES = [
    {"name": "resnet20", "arguments": {"num_classes": 10**12}},
    {"name": "resnet20", "arguments": {"num_classes": 0}},
    {"name": "resnet20", "arguments": {"num_classes": True}},
    {"name": "resnet20", "arguments": {"num_classes": "10"}},
    {"name": "resnet20", "arguments": {"widths": [3]}},
    {"name": "resnet20", "arguments": {"__class__": 1}},
    {"name": "small_cnn", "arguments": {"widths": []}},
    {"name": "small_cnn", "arguments": {"widths": [8] * 10_000}},
    {"name": "small_cnn", "arguments": {"widths": [2**40]}},
    {"name": "small_cnn", "arguments": {"widths": 8}},
    {"name": "resnet20", "arguments": []},
    {"name": ["resnet20"], "arguments": {}},
    {"name": "resnet20"},
    "resnet20",
    [],
]
STRANGE_NOTES = [{"name": name, "arguments": {}} for name in ("../../resnet20", "os:system", "build", "noting", "é\n")]


@pytest.mark.parametrize("note", [*NOTES, *STRANGE_NOTES], ids=str)
def test_a_note_that_lies_is_refused(note, folder):
    note = {**note, "is_changed": False} if isinstance(note, dict) else note
    path = rewrite(folder / "resnet20", lambda _, description: description.update(built_by=note))
    error = InvalidArgumentError if note in ({**n, "is_changed": False} for n in STRANGE_NOTES) else ArtifactError
    with pytest.raises(error) as caught:
        dn.load(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize("method", ["width", "scratch", "tucker", "slimmable", "us-net"])
def test_the_sizes_of_a_method_are_loaded_without_the_model(method, tmp_path):
    settings = Settings(sizes=(1.0, 0.5, 0.2), width=0.5, ranks=(2, 9, 6), tuning_epochs=1)
    made, x = methods.find(method), torch.randn(16, 1, 8, 8)
    batch = x, torch.randint(0, 10, (16,))
    model = decaying(models.small_cnn((12, 16)))
    network = made.network(model, x[:1], settings, is_trained=method == "tucker")
    net = made.sized(network.eval(), Material(example_input=x[:1], calibration=[batch], loss=cross_entropy), settings)
    net.eval().save(tmp_path / "net", info={"input_shape": [1, 8, 8]})
    path = tmp_path / "net"
    again = dn.load(path)
    for size in net.sizes:
        net.set_plan_(size)
        again.set_plan_(size)
        assert torch.equal(again(x), net(x))
    assert dn.load(path, macs=1.0).plan == again.choose(macs=1.0)
    with pytest.raises(InvalidArgumentError, match=r"ratio=: .* allowed: macs, params"):
        dn.load(path, ratio=0.5)
    lying = {"name": "small_cnn", "arguments": {"widths": [2**14] * 64}, "is_changed": False}  # 600 GB
    path = rewrite(tmp_path / "net", lambda _, description: description.update(built_by=lying))
    with pytest.raises(ArtifactError, match="lying"):
        dn.load(path)


# --- a hostile or careless hand ------------------------------------------------------------------------------------


def taken_apart(content):
    """A file's header as safetensors has it, its description, and what comes behind."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    return header, json.loads(header["__metadata__"]["decomposable"]), content[end:]


def put_together(header, description, data):
    """A file of these, whatever they are, with the checksum of the header that `docs/artifact.md` describes."""
    header, zeros = copy.deepcopy(header), "0" * 64
    if isinstance(description, dict):
        description["sha256"] = zeros
    if isinstance(header.get("__metadata__"), dict) and "decomposable" in header["__metadata__"]:
        text = description if isinstance(description, str) else json.dumps(description)
        header["__metadata__"]["decomposable"] = text
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    raw = len(raw).to_bytes(8, "little") + raw
    return raw.replace(zeros.encode(), hashlib.sha256(raw).hexdigest().encode(), 1) + data


def rewrite(path, change):
    """The file after a change of its header and description, with the right checksum."""
    header, description, data = taken_apart(path.read_bytes())
    change(header, description)
    lying = path.with_name("lying.safetensors")
    lying.write_bytes(put_together(header, description, data))
    return lying


def test_a_file_put_together_by_hand_is_the_file(folder):
    content = (folder / "mixed").read_bytes()
    path = rewrite(folder / "mixed", lambda *_: None)
    assert_same_tensors(
        dn.load(path, model=Mixed()).state_dict(), dn.load(folder / "mixed", model=Mixed()).state_dict()
    )
    assert taken_apart(path.read_bytes())[2] == taken_apart(content)[2]


ODD = [
    None,
    True,
    -1,
    0,
    1,
    2,
    3,
    7,
    2**31,
    2**62,
    2**63,
    2**64,
    10**30,
    0.5,
    1e300,
    "",
    "0",
    "conv",
    "state",
    "é\n\x1b[2J",
]
ODD += [
    "../../etc/passwd",
    "a" * 3000,
    [],
    [0],
    [-1, 5],
    [2**40, 2**40],
    {},
    {"name": "x"},
    [[[[[[]]]]]],
    "F64",
    "float64",
]


def mutate(value, dice):
    """Change one thing somewhere inside: another value, one missing, one twice, one in another's place."""
    while True:
        keys = sorted(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = dice.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and dice.random() < 0.8:
            value = value[key]
            continue
        what = dice.random()
        if what < 0.6:
            value[key] = copy.deepcopy(dice.choice(ODD))
        elif what < 0.7 and isinstance(value[key], int):
            value[key] += dice.choice((-1, 1, 10**6))
        elif what < 0.8:
            del value[key]
        elif what < 0.9 and isinstance(value, list):
            value.insert(key, copy.deepcopy(value[key]))
        else:
            other = dice.choice(keys)
            value[key], value[other] = value[other], value[key]
        return


SMALL = {"small": lambda: models.small_cnn((4, 6), in_channels=1), "shared": Mixed}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """Small files of all kinds, with the input that their networks take."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("targets")
    x = torch.randn(4, 1, 6, 6)
    net = decompose(SMALL["small"]().eval(), example_input=x)
    net.calibrate_([x], sizes=[0.8, 0.9])
    net.save(folder / "network", info={"a": [1, {"b": "é"}]})
    artifact.save_size(net, net.selector.choose(ratio=0.5), folder / "size")
    artifact.shrink(net.artifact(), net.selector.choose(ratio=0.7)).save(folder / "shrunk")
    method = methods.find("us-net")
    settings = Settings(sizes=(1.0, 0.5))
    network = method.network(SMALL["small"](), x[:1], settings, is_trained=False)
    material = Material(example_input=x[:1], calibration=[(x, torch.zeros(4, dtype=torch.long))], loss=cross_entropy)
    method.sized(network.eval(), material, settings).save(folder / "sized", info={"input_shape": [1, 6, 6]})
    for kind in KINDS:
        assert dn.load(folder / kind)(x).shape == (4, 10)
    return folder, x


KINDS = ("network", "size", "shrunk", "sized")
WAYS = (
    lambda path: dn.load(path),
    lambda path: dn.load(path, model=SMALL["small"]()),
    lambda path: dn.load(path, ratio=0.4),
    lambda path: dn.load(path, model=SMALL["small"](), macs=0.85),
    lambda path: artifact.outline(path),
    lambda path: artifact.read(path, ratio=0.4),
)
ALLOWED_TO_SAY = ("model", "macs", "params", "ratio", "ranks")  # what the caller gave, or did not give


def is_module(net):
    return isinstance(net, nn.Module)


def attempt(path, content, way, x, *, must_fail=False, name=""):
    """Load it: it is refused in one line, or the result works as any other."""
    path.write_bytes(content)
    try:
        net, refusal = way(path), None
    except (ArtifactError, InvalidArgumentError) as error:
        net, refusal = None, error
    if refusal is not None:
        text = str(refusal)
        assert text.isprintable(), repr(text)
        assert len(text) < 1000, text
        assert str(path) in text if isinstance(refusal, ArtifactError) else text.startswith(ALLOWED_TO_SAY), text
        return False
    assert not must_fail, f"damage of {name} was not found"
    floats = (
        {t.dtype for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()} if is_module(net) else set()
    )
    if len(floats) == 1:  # a network may well be of several types, but this one would not run
        x = x.to(*floats)
        net.eval()(x)
        if isinstance(net, dn.DecomposedNet):
            net.resize_(ranks=dict.fromkeys(net.plan.ranks, 1))
            net(x)
            net.save(path)
    return True


def with_one_bit_changed(content, dice, start, end):
    place = dice.randrange(start, end)
    return content[:place] + bytes([content[place] ^ 1 << dice.randrange(8)]) + content[place + 1 :]


def damaged(content, dice):
    """One of the ways in which disks and networks damage files."""
    end = 8 + int.from_bytes(content[:8], "little")
    what = dice.random()
    if what < 0.4:
        return with_one_bit_changed(content, dice, 0, end)
    if what < 0.5:
        return with_one_bit_changed(content, dice, 0, 16)
    if what < 0.7:
        return content[: dice.choice([dice.randrange(len(content)), dice.randrange(end), end, len(content) - 1, 8])]
    if what < 0.8:
        return content + bytes(dice.randrange(1, 9))
    if what < 0.9:
        start = dice.randrange(end)
        return content[:start] + bytes(min(64, end - start)) + content[start + min(64, end - start) :]
    return dice.randbytes(dice.randrange(1, 64)) + content


def hostile(content, dice):
    """A file whose checksums are right and whose claims are not."""
    header, description, data = taken_apart(content)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        if dice.random() < 0.75:
            mutate(description, dice)
        else:
            mutate(header, dice)
    return put_together(header, description, data)


SPOIL = (
    lambda t, dice: t[: dice.randrange(1 + len(t))] if t.dim() else t[None],
    lambda t, dice: t.reshape(-1),
    lambda t, dice: t[..., None],
    lambda t, dice: torch.cat([t, t]) if t.dim() else t.repeat(3),
    lambda t, dice: t.transpose(0, -1).contiguous() if t.dim() else t,
    lambda t, dice: t.to(dice.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.float8_e5m2])),
    lambda t, dice: torch.full_like(t, dice.choice([0, 1, 100])),
    lambda t, dice: (
        torch.full_like(t, dice.choice([-1, 0.5, torch.nan, torch.inf, 1e30])) if t.is_floating_point() else t ^ 1
    ),
    lambda t, dice: t.flip(0) if t.dim() else t,
    lambda t, dice: t + 2**40 if t.dtype == torch.int64 else t,
)


def hostile_tensors(content, dice):
    """A file whose checksums are right and whose tensors are not."""
    header, description, data = taken_apart(content)
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, (begin, end, _) in places(content).items():
        entry = header[name]
        raw = torch.frombuffer(bytearray(data[begin - start : end - start] or b"0" * 8), dtype=torch.uint8)
        tensors[name] = raw[: end - begin].view(container.DTYPES[entry["dtype"]]).reshape(entry["shape"])
    for _ in range(dice.choice((1, 1, 2))):
        name = dice.choice(sorted(tensors))
        tensors[name] = dice.choice(SPOIL)(tensors[name].clone(), dice).contiguous()
    made = {}
    position, parts = 0, []
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        dtype = next(key for key, value in container.DTYPES.items() if value == tensor.dtype)
        offsets = [position, position + len(raw)]
        made[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        description["blocks"][name] = [max(1, tensor.shape[0] if tensor.dim() else 1), hashlib.sha256(raw).hexdigest()]
        if not raw:
            description["blocks"][name][1] = ""
        position += len(raw)
        parts.append(raw)
    return put_together({"__metadata__": header["__metadata__"], **made}, description, b"".join(parts))


def fuzz(targets, seed, cases, spoil, **options):
    folder, x = targets
    contents = {kind: (folder / kind).read_bytes() for kind in KINDS}
    dice, loaded = random.Random(seed), 0
    for _ in range(cases):
        kind, way = dice.choice(KINDS), dice.choice(WAYS)
        content = spoil(contents[kind], dice)
        if content != contents[kind]:
            loaded += attempt(folder / "spoilt.safetensors", content, way, x, **options)
    return loaded


def test_every_damage_of_a_header_is_found(targets):
    fuzz(targets, 0, 300, damaged, must_fail=True)


def test_every_byte_of_a_header_counts(targets):
    folder, x = targets
    content = (folder / "network").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for place in range(0, end, 23):
        spoilt = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        attempt(folder / "spoilt.safetensors", spoilt, WAYS[place % 2 * 5], x, must_fail=True)


def test_every_changed_bit_of_a_tensor_is_found(targets):
    folder, x = targets
    dice = random.Random(1)
    for kind in KINDS:
        content = (folder / kind).read_bytes()
        for name, (start, end, _) in places(content).items():
            if start < end:
                spoilt = with_one_bit_changed(content, dice, start, end)
                attempt(folder / "spoilt.safetensors", spoilt, WAYS[0], x, must_fail=True, name=name)


def test_a_hostile_file_is_refused_or_works(targets):
    loaded = fuzz(targets, 2, 400, hostile)
    assert loaded > 20  # some changes are no lies


def test_a_file_of_hostile_tensors_is_refused_or_works(targets):
    loaded = fuzz(targets, 3, 200, hostile_tensors)
    assert loaded > 20  # one network is as good as another


TEXTS = {
    "no JSON": "{",
    "a list": "[]",
    "deep": '{"format":2,"a":' + "[" * 50_000 + "]" * 50_000 + "}",
    "deep objects": '{"format":2,"a":' + '{"a":' * 50_000,
    "a long number": '{"format":2,"a":' + "1" * 100_000 + "}",
    "no number": '{"format":2,"sha256":"' + "0" * 64 + '","a":NaN}',
    "infinity": '{"format":2,"sha256":"' + "0" * 64 + '","a":-1e999}',
    "half a character": '{"format":2,"sha256":"' + "0" * 64 + '","a":"\\udc00"}',
    "a key twice": '{"format":2,"format":2,"sha256":"' + "0" * 64 + '"}',
    "nothing else": '{"format":2,"sha256":"' + "0" * 64 + '"}',
    "no blocks": '{"format":2,"sha256":"' + "0" * 64 + '","kind":"network","strides":{},"blocks":{}}',
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_description_that_is_none_is_refused(text, way, targets):
    folder, x = targets
    header, _, data = taken_apart((folder / "network").read_bytes())
    content = put_together(header, TEXTS[text], data)
    assert not attempt(folder / "spoilt.safetensors", content, WAYS[way], x, must_fail=True)


def claims(header, description):
    """Files that claim to be larger than they are."""

    def tensor(name, **entry):
        return {**header, name: {**header[name], **entry}}, description

    def described(**fields):
        return header, {**copy.deepcopy(description), **fields}

    name = "first/0"
    first, *others = description["layers"]
    yield tensor(name, shape=[10**9, 1, 1, 3])
    yield tensor(name, shape=[2**40, 2**40, 2**40])
    yield tensor(name, shape=[0, 2**62, 2**62])
    yield tensor(name, shape=[2**64, 1])
    yield tensor(name, shape=[-1, 4])
    yield tensor(name, data_offsets=[0, 10**10])
    yield tensor(name, data_offsets=[-8, 16])
    yield tensor(name, data_offsets=[16, 8])
    yield tensor(name, data_offsets=[10**10, 10**10 + 4])
    yield tensor(name, dtype="F64")
    yield tensor(name, dtype="F4")
    yield tensor(name, dtype="C64")
    yield described(layers=[{**first, "shape": [10**6, 10**6, 3, 3]}, *others])
    yield described(layers=[{**first, "shape": [2**31, 1, 3, 3], "dense_macs": 2**61}, *others])
    yield described(layers=[{**first, "name": "../../x", "paths": ["../../x"]}, *others])
    yield described(strides={name: [2**47, 2**40, 1, 1]})
    yield described(blocks={**description["blocks"], name: [1, "0" * 10**6]})
    yield described(blocks={**description["blocks"], name: [10**30, ""]})
    yield described(blocks={**description["blocks"], name: [-1, "0" * 64]})
    yield described(blocks={**description["blocks"], "more": [1, "0" * 64]})
    yield described(plan=[[10**12, True] for _ in description["plan"]])
    yield described(input={"shape": [10**5, 10**5], "dtype": "float32"})
    yield described(input={"shape": [1] * 10**5, "dtype": "float32"})
    yield described(built_by={"name": "small_cnn", "arguments": {"widths": [2**14] * 64}, "is_changed": False})
    yield described(built_by={"name": "resnet50", "arguments": {"num_classes": 2**20}, "is_changed": False})


def test_no_memory_is_taken_for_a_claim(targets):
    folder, x = targets
    header, description, data = taken_apart((folder / "network").read_bytes())
    files = [put_together(copy.deepcopy(h), copy.deepcopy(d), data) for h, d in claims(header, description)]
    files += [length.to_bytes(8, "little") + b"{}" for length in (2, 100, 10**7, 10**10, 2**62, 2**64 - 1)]
    model = SMALL["small"]()
    ways = (lambda p: dn.load(p), lambda p: dn.load(p, model=model), lambda p: dn.load(p, ratio=0.4))
    with address_space(400 << 20):
        for i, content in enumerate(files):
            attempt(folder / "spoilt.safetensors", content, ways[0], x)
            attempt(folder / "spoilt.safetensors", content, ways[1 + i % 2], x)


@contextlib.contextmanager
def address_space(more):
    """Let the process grow by so many bytes and no more, where the system can do that; all claims are of gigabytes."""
    resource, statm = pytest.importorskip("resource"), Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("the system does not say how large a process is")
    with statm.open() as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
