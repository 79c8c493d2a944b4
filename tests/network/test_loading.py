"""Loading a part of a file, loading without the model's code, and loading files from a hostile or careless hand."""

import contextlib
import copy
import hashlib
import json
import math
import os
import random
import types
import warnings
from io import FileIO
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import decomposable as dn
from decomposable import decompose, models
from decomposable.models.origin import BUILDERS, built_by, rebuilt
from decomposable.network import artifact
from decomposable.network.file import container
from decomposable.recipes import BUILT_IN, find, make_task
from decomposable_edge.errors import ArtifactError, BudgetError, InvalidArgumentError, ModelNeededError
from decomposable_edge.fields import Damaged
from decomposable_edge.file import header
from decomposable_edge.file.container import Blocks, Stored
from decomposable_edge.file.header import DTYPES, itemsize, parse_header, read_header
from decomposable_edge.sizing.interpolation import choose_calibrated
from decomposable_edge.sizing.latency import Entry, LatencyProfile, TimedSize
from decomposable_edge.sizing.plans import SizeRequest
from refusals import Saying, refused

pytestmark = [
    pytest.mark.filterwarnings("ignore:batch normalisation (still has|was calibrated)"),
    pytest.mark.filterwarnings("ignore:batch normalisation has statistics of ranks that were not rounded"),
]


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
    {"macs": 0.6, "align": 4},
    {"ratio": 0.6, "align": 8},
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
    rounded = make()
    rounded.calibrate_([image(8), image(8)], [0.45, 0.6, 0.75, 0.9], align=4)
    rounded.calibrate_([image(8), image(8)], [0.75, 0.9], align=8)
    rounded.save(folder / "rounded")
    make(limits={"one": (2, 17)}, min_rank=2).save(folder / "limits")
    make(calibrated=False).to(torch.bfloat16).save(folder / "bfloat16")
    make().to(memory_format=torch.channels_last).save(folder / "channels-last")
    whole = artifact.read(folder / "mixed")
    artifact.shrink(whole, whole.selector.plan_for(SizeRequest(ratio=0.8))).save(folder / "shrunk")
    return folder


FILES = ("mixed", "resnet20", "channel", "limits", "bfloat16", "channels-last", "shrunk", "rounded")


def model_of(file):
    return BUILD.get(file, Mixed)()


def asked(file, size):
    """The size, unless the network has none so small."""
    try:
        artifact.outline(file).selector.plan_for(SizeRequest(**size))
    except BudgetError:
        pytest.skip("too small for this network")
    return size


# --- one file, any size --------------------------------------------------------------------------------------------


FEW = ({"macs": 0.6}, {"ratio": 0.9}, {"macs": 0.6, "align": 4})
EVERY_PART = [
    pytest.param(file, size, marks=[] if file == "mixed" or size in FEW else pytest.mark.slow, id=f"{file}-{size}")
    for file in FILES
    for size in SIZES
]


@pytest.mark.parametrize(("file", "size"), EVERY_PART)
def test_a_part_of_a_file_is_that_part_of_the_whole(folder, file, size, tmp_path):
    """Of what the file holds, where `shrink` takes the part; and of the network made from it, where `resize_` does."""
    path, size = folder / file, asked(folder / file, size)
    check_contents(path, size, tmp_path)
    check_network(path, size, model_of(file))


def check_network(path, size, model):
    whole, part = dn.load(path, model=model), dn.load(path, model=model, **size)
    x = image().to(next(whole.parameters()).dtype)
    assert whole.resize_(**size) == part.plan()
    assert_same_values(whole.module.state_dict(), part.module.state_dict())
    assert torch.equal(whole(x), part(x))
    assert_same_tensors(whole.extract().state_dict(), part.extract().state_dict())
    assert part.info == whole.info
    for name, factors in part._factors.items():
        rank = len(factors[0])
        assert torch.equal(factors[0], whole._factors[name][0][:rank])
        assert torch.equal(factors[1], whole._factors[name][1][:, :rank])


def check_contents(path, size, tmp_path):
    whole = artifact.read(path)
    plan = choose_calibrated(whole.selector, whole.statistics, SizeRequest(**size))
    expected, part = artifact.shrink(whole, plan), artifact.read(path, **size)
    assert part.plan == expected.plan
    assert_same_tensors(expected.state, part.state)
    assert aliases(expected.state) == aliases(part.state)
    for name, factors in expected.factors.items():
        assert_same_tensors(dict(enumerate(factors)), dict(enumerate(part.factors[name])))
    # What a file holds is all that there is, so equal files are equal networks.
    expected.save(tmp_path / "expected")
    part.save(tmp_path / "part")
    assert (tmp_path / "expected").read_bytes() == (tmp_path / "part").read_bytes()
    for tensor in (t for f in part.factors.values() for t in f):
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


def calibrated_in_many_ways(kind, form):
    """A network with statistics of plain ranks and of rounded ones: the nearest size is often not the next by MACs."""
    if kind == "small_cnn":
        model, x = models.small_cnn((16, 32, 48)), torch.randn(8, 1, 16, 16)
        aligns, sizes = (None, 8, 16), None
    else:
        model, x = models.resnet20(), torch.randn(2, 3, 16, 16)
        aligns, sizes = (None, 8), [i / 40 for i in range(10, 41)]
    net = decompose(decaying(model).eval(), example_input=x[:1], form=form)
    for align in aligns:
        net.calibrate_([x], sizes, align=align)
    return net, x


def sizes_within(selector, ranks, count, dice):
    """Sizes of all kinds that a network has."""
    plans = [selector.full_plan(), selector.smallest_plan()]
    while len(plans) < count:
        align = dice.choice((None, None, 4, 8, 16, 64))
        with contextlib.suppress(BudgetError):
            if dice.random() < 0.2:
                plans.append(
                    selector.plan_for(SizeRequest(ranks={name: dice.randint(1, most) for name, most in ranks.items()}))
                )
            else:
                by = dice.choice(("macs", "params", "ratio"))
                plans.append(selector.plan_for(SizeRequest(**{by: 1 - dice.random()}, align=align)))
    return plans


@pytest.mark.parametrize(
    ("kind", "form", "step"),
    [
        pytest.param("small_cnn", "spatial", 0.05, marks=pytest.mark.slow),
        ("small_cnn", "channel", 0.1),
        pytest.param("resnet20", "spatial", 0.15, marks=pytest.mark.slow),
    ],
)
def test_statistics_of_rounded_ranks_beside_others(kind, form, step, tmp_path):
    net, x = calibrated_in_many_ways(kind, form)
    net.save(tmp_path / "net")
    whole, stored, dice = dn.load(tmp_path / "net"), artifact.read(tmp_path / "net"), random.Random(0)
    for part in (step * i for i in range(1, int(1 / step) + 1)):
        for size in ({"macs": part}, {"macs": part, "align": 8}, {"macs": part, "align": 16}, {"ratio": part}):
            try:
                plan = whole.resize_(**size)
            except BudgetError:
                continue
            small = dn.load(tmp_path / "net", **size)
            shrunk = artifact.shrink(stored, plan)
            assert small.plan() == plan
            assert torch.equal(small(x), whole(x))
            assert plan.is_full or len(small._statistics.plans) <= len(whole._statistics.plans)
            for each in sizes_within(small.selector, plan.ranks, 20, dice):
                expected = whole._statistics.at(each)
                for statistics in (small._statistics, shrunk.statistics):
                    found = statistics.at(each)
                    assert all(all(map(torch.equal, pair, found[name])) for name, pair in (expected or {}).items())
    assert len(dn.load(tmp_path / "net", macs=0.3)._statistics.plans) < 0.6 * len(whole._statistics.plans)


@pytest.mark.parametrize("form", ["spatial", "channel"])
def test_below_a_loaded_size_all_is_the_same_but_the_last_digits_of_truncated_dense_weights(form, tmp_path):
    decompose(models.resnet20().eval(), example_input=image(), form=form).save(tmp_path / "net")
    whole, exact, others = dn.load(tmp_path / "net"), 0, 0
    for largest in (0.9, 0.6, 0.45):
        part = dn.load(tmp_path / "net", ratio=largest)
        for ratio in (0.8, 0.55, 0.5, 0.4, 0.3, 0.1):
            if ratio >= largest:
                continue
            plan = whole.resize_(ratio=ratio)
            assert part.resize_(ratio=ratio) == plan
            theirs = part.module.state_dict()
            for key, tensor in whole.module.state_dict().items():
                layer = key.removesuffix(".weight")
                # W less the bases that are dropped, some of which are gone already
                if layer in plan.dense and plan.full_ranks[layer] < 2 * plan.ranks[layer]:
                    torch.testing.assert_close(theirs[key], tensor, rtol=0, atol=1e-6)
                    others += 1
                else:
                    assert torch.equal(theirs[key], tensor)
                    exact += 1
    assert exact > 500
    assert (others > 10) == (form == "spatial")


@pytest.mark.parametrize(
    ("size", "option", "came", "allowed"),
    [
        ({"macs": 1e-6}, "macs", 1e-6, Saying("^0.0.* of the original")),
        ({"macs": 0.5, "params": 0.5}, "size", "macs, params", "exactly one of macs, params, ratio or ranks"),
        ({"ranks": {"nowhere": 3}}, "ranks", "nowhere", Saying("^'conv1', ")),
        ({"ratio": 2}, "ratio", 2, "a number in (0, 1]"),
        ({"align": 8}, "size", "none", "exactly one of macs, params, ratio or ranks"),
        ({"batch": 1}, "size", "none", "exactly one of macs, params, ratio or ranks"),
        ({"macs": 0.5, "align": 0}, "align", 0, Saying("^an int of at least 1")),
        ({"ranks": {}, "align": 8}, "align", 8, "one of align and ranks"),
        ({"latency_ms": 5}, "latency_ms", 5, Saying("decomposable bench")),
        ({"macs": 0.5, "align": "measured"}, "align", "measured", Saying("decomposable bench")),
    ],
)
def test_a_size_that_cannot_be_is_refused_as_by_resize(folder, size, option, came, allowed):
    for use in (lambda path: dn.load(path, **size), lambda path: artifact.read(path, **size)):
        with refused(option, came, allowed):
            use(folder / "resnet20")


def timed(selector, part, milliseconds):
    plan = selector.plan_for(SizeRequest(macs=part))
    return TimedSize(
        macs=plan.macs,
        macs_fraction=plan.macs_fraction,
        params=plan.params,
        params_fraction=plan.params_fraction,
        median_ms=milliseconds,
        low_ms=milliseconds,
        high_ms=milliseconds,
        repetitions=9,
    )


@pytest.mark.parametrize(
    "size",
    [
        {"latency_ms": 3.0},
        {"latency_ms": 3.0, "batch": 8},
        {"latency_ms": 3.0, "align": "measured"},
        {"macs": 0.6, "align": "measured"},
        {"macs": 0.8, "align": "measured", "batch": 8},
    ],
    ids=str,
)
def test_a_size_is_given_by_what_was_measured_beside_the_file(size, folder, tmp_path):
    path = tmp_path / "net"
    path.write_bytes((folder / "rounded").read_bytes())
    selector = artifact.outline(path).selector
    entries = [
        Entry(
            runtime="torch",
            batch=batch,
            threads=torch.get_num_threads(),
            sizes=tuple(timed(selector, part, milliseconds) for part, milliseconds in sizes),
            align=align,
            trials=((1, 2.0), (align, 1.0)),
        )
        for batch, align, sizes in (
            (1, 4, [(0.5, 2.0), (0.7, 4.0), (0.9, 5.0)]),
            (8, 8, [(0.75, 2.5), (0.85, 4.0), (0.95, 9.0)]),
        )
    ]
    LatencyProfile.of(selector, entries).save(LatencyProfile.path_beside(path))
    whole, part = dn.load(path, model=Mixed()), dn.load(path, model=Mixed(), **size)
    plan, x = whole.resize_(**size), image()
    assert part.plan() == plan == artifact.read(path, **size).plan
    assert part.plan().align == plan.align > 1
    assert not plan.is_full
    assert torch.equal(part(x), whole(x))
    assert part.resize_(**size) == plan  # a part of a network goes by the same times


def test_without_statistics_a_size_warns_as_resize_does(folder, tmp_path):
    decompose(models.small_cnn(), example_input=torch.zeros(1, 1, 8, 8)).save(tmp_path / "net")
    with pytest.warns(UserWarning, match="batch normalisation still has the full network's statistics") as caught:
        dn.load(tmp_path / "net", macs=0.5)
    assert caught[0].filename == __file__


def test_rounded_ranks_without_statistics_of_their_own_warn_as_resize_does(folder):
    with pytest.warns(UserWarning, match=r"run calibrate_.loader, align=4. once") as caught:
        dn.load(folder / "mixed", model=Mixed(), macs=0.6, align=4)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dn.load(folder / "rounded", model=Mixed(), macs=0.6, align=4)


def test_a_file_of_one_size_takes_no_size(folder, tmp_path):
    whole = artifact.read(folder / "mixed")
    artifact.save_size(whole, whole.selector.plan_for(SizeRequest(ratio=0.5)), tmp_path / "size")
    with refused("macs", 0.5, Saying("^no size, or the network file")):
        dn.load(tmp_path / "size", model=Mixed(), macs=0.5)


# --- the bytes that are read ---------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch):
    """Every read of a network file: where it begins, and how many bytes came. No other way to read one is left."""
    reads = []

    class Closed(FileIO):
        def refuse(self, *_):
            raise AssertionError("read in another way")

        read = readall = readinto = readline = readlines = __iter__ = refuse

    def counted_read(file, place, content):
        count = read_some(file, place, content)
        reads.append((place, count))
        return count

    read_some = header._read_some
    monkeypatch.setattr(header, "_read_some", counted_read)
    monkeypatch.setattr("decomposable_edge.file.container._OpenFile", Closed)
    return reads


def read_by_tensor(path, reads):
    """How many bytes of each tensor were read; none lies in two tensors."""
    read = {}
    for name, (start, end, _) in places(path.read_bytes()).items():
        read[name] = sum(count for place, count in reads if start <= place and place + count <= end)
        assert not [place for place, count in reads if place < end < place + count]
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
        f"{kind}/{name}": stage.nbytes
        for name, stages in net._factors.items()
        for kind, stage in zip(("first", "second"), stages, strict=True)
    }
    small = dn.load(tmp_path / "net", macs=0.25)
    read = read_by_tensor(tmp_path / "net", counted)
    assert sum(read[name] for name in factors) <= 0.4 * sum(factors.values())
    description = container.read_container(tmp_path / "net")[0]
    for name, nbytes in factors.items():
        layer = name.partition("/")[2]
        block, count = description["blocks"][name][0], len(net._factors[layer][0])
        used = min(count, -(-small.plan().ranks[layer] // block) * block)  # the rest of a block, and no more
        assert read[name] == used * nbytes // count
    for name in small.plan().ranks:
        assert (read[f"state/{name}.weight"] > 0) == (name in small.plan().dense)
    counted.clear()
    dn.load(tmp_path / "net")
    read = read_by_tensor(tmp_path / "net", counted)
    assert {name: read[name] for name in factors} == factors


def bytes_read():
    """What this process has read from anything, caches included, where the system says that."""
    counts = Path("/proc/self/io")
    if not counts.exists():
        pytest.skip("the system does not count the bytes that a process reads")
    return int(counts.read_text().split()[1])


@pytest.mark.parametrize("form", ["spatial", "channel"])
def test_a_quarter_of_the_macs_reads_less_than_half_of_the_file(form, tmp_path):
    net = decompose(decaying(models.resnet20().eval()), example_input=torch.zeros(1, 3, 32, 32), form=form)
    net.save(tmp_path / "net")
    factors = sum(stage.nbytes for stages in net._factors.values() for stage in stages)
    weights = sum(tensor.nbytes for name, tensor in net.artifact().state.items() if name.endswith("weight"))
    dn.load(tmp_path / "net", macs=0.25)  # imports what it needs
    start = bytes_read()
    dn.load(tmp_path / "net", macs=0.25)
    part = bytes_read() - start
    dn.load(tmp_path / "net")
    whole = bytes_read() - start - part
    size = (tmp_path / "net").stat().st_size
    assert size <= whole < size + 50_000  # what it is compared with
    assert part < 0.5 * size
    assert part - (size - factors - weights) <= 0.4 * factors  # the rest of the file is small, whatever of it is read


def test_a_file_that_is_cut_short_while_it_is_read_is_an_error(folder, tmp_path, monkeypatch):
    content = (folder / "mixed").read_bytes()
    cut = 8 + int.from_bytes(content[:8], "little")

    def read_rows(*args):
        os.truncate(tmp_path / "net", cut + 100)  # a mapped file would end the process
        return read(*args)

    (tmp_path / "net").write_bytes(content)
    read = Stored._read
    monkeypatch.setattr(Stored, "_read", read_rows)
    for use in (lambda path: dn.load(path, model=Mixed(), macs=0.6), artifact.read):
        (tmp_path / "net").write_bytes(content)
        with refused(kind=ArtifactError, path=tmp_path / "net", reason=Saying("cut short while it was")):
            use(tmp_path / "net")


def headers(dice):
    """Headers of safetensors files that are right or nearly so, and the bytes behind them."""
    entries, position = {}, 0
    for i in range(dice.randrange(4)):
        dtype, shape = dice.choice(sorted(DTYPES)), [dice.randrange(4) for _ in range(dice.randrange(4))]
        count = math.prod(shape) * itemsize(DTYPES[dtype])
        entries[f"{dice.choice('abc')}{i}"] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + count],
        }
        position += count
    if dice.random() < 0.5:
        entries["__metadata__"] = {"a": "b"}
    if dice.random() < 0.7 and entries:
        mutate(entries, dice)
    shuffled = dice.sample(sorted(entries), len(entries))
    text = json.dumps({name: entries[name] for name in shuffled}, ensure_ascii=dice.random() < 0.5)
    if dice.random() < 0.1:
        text = dice.choice(
            [text.replace(":", ":\n"), text + " ", " " + text, text.replace('"a', '"b'), text[:-1], "[]"]
        )
    raw = text.encode()
    return len(raw).to_bytes(8, "little") + raw, bytes(max(0, position + dice.choice((0, 0, 0, 0, 1, -1))))


def test_a_header_that_is_taken_is_one_that_safetensors_takes(tmp_path):
    dice, taken = random.Random(0), 0
    for _ in range(3000):
        begin, data = headers(dice)
        (tmp_path / "file").write_bytes(begin + data)
        try:
            with FileIO(tmp_path / "file", "rb") as file:
                entries, metadata = parse_header(read_header(file), len(begin) + len(data))
        except Damaged:
            continue
        taken += 1
        with safe_open(tmp_path / "file", framework="pt") as file:
            assert list(entries) == sorted(file.keys())
            assert (file.metadata() or {}) == metadata
            for name, entry in entries.items():
                part = file.get_slice(name)
                assert (DTYPES[part.get_dtype()], tuple(part.get_shape())) == (entry.dtype, entry.shape)
        assert {name: entry.start for name, entry in entries.items()} == {
            name: start for name, (start, _, _) in places(begin + data).items()
        }
    assert 800 < taken < 2500


def test_listing_sizes_reads_neither_factors_nor_weights(folder, counted):
    outline = artifact.outline(folder / "mixed")
    read = read_by_tensor(folder / "mixed", counted)
    assert not [
        name for name in read if read[name] and name.startswith(("first/", "second/", "state/", "statistics/mean"))
    ]
    assert outline.selector.plan_for(SizeRequest(macs=0.6)) == artifact.read(folder / "mixed").selector.plan_for(
        SizeRequest(macs=0.6)
    )


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
        is_pair = layer.removesuffix(".weight") not in part.plan().dense
        if kind in ("first", "second") and rows:
            block = description["blocks"][name][0]
            start += -(-part.plan().ranks[layer] // block) * block * (end - start) // rows
        elif not (kind == "state" and layer.removesuffix(".weight") in part.plan().ranks and is_pair):
            continue
        spoilt[start:end] = bytes(255 - byte for byte in spoilt[start:end])
        damaged += max(0, end - start)
    assert damaged > 0.6 * len(content)
    (tmp_path / "net").write_bytes(spoilt)
    assert_same_tensors(expected, dn.load(tmp_path / "net", **size).extract().state_dict())
    for use in (lambda: dn.load(tmp_path / "net"), lambda: dn.load(tmp_path / "net", macs=0.7)):
        with refused(kind=ArtifactError, path=tmp_path / "net", reason=Saying("^the checksum of tensor '.*' is wrong")):
            use()


def test_every_row_that_is_used_is_verified(folder, tmp_path):
    content = (folder / "mixed").read_bytes()
    plan = artifact.outline(folder / "mixed").selector.plan_for(SizeRequest(macs=0.6))
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
            reason = Saying(f"^the checksum of tensor '{name}' is wrong")
            with refused(kind=ArtifactError, path=tmp_path / "net", reason=reason):
                dn.load(tmp_path / "net", model=Mixed(), macs=0.6)


def raw_of(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    "shape", [(), (0,), (0, 3), (3, 0), (1,), (1, 5000), (3, 2), (5000,), (130, 1024), (7, 3, 50, 11)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e5m2])
def test_blocks_of_any_tensor(shape, dtype, tmp_path):
    tensor = (torch.rand(shape) * 9).to(dtype)
    blocks = Blocks.of(shape, container.InTorch().bytes_of(tensor))
    assert len(blocks.sha256) <= 64 * 64
    raw = raw_of(tensor).numpy().tobytes()
    step = blocks.rows * (len(raw) // max(1, shape[0] if shape else 1)) or 1
    pieces = [raw[start : start + step] for start in range(0, len(raw), step)]
    assert blocks.sha256 == "".join(hashlib.sha256(piece).hexdigest() for piece in pieces)
    assert len(raw) < 2 * 4096 or len(pieces) > 1 or not shape or shape[0] == 1
    container.write_container(tmp_path / "file", {}, {"x": tensor})
    with container.open_container(tmp_path / "file") as opened:
        assert torch.equal(raw_of(opened.tensors["x"].all()), raw_of(tensor))
        for rows in {1, 2, 3, blocks.rows, blocks.rows + 1, 10**6} if shape else ():
            part = opened.tensors["x"][:rows]
            assert torch.equal(raw_of(part), raw_of(tensor[:rows]))
            assert part.untyped_storage().nbytes() == part.nbytes
            last = opened.tensors["x"][rows - 1 :]
            assert torch.equal(raw_of(last), raw_of(tensor[rows - 1 :]))


def test_the_digests_of_a_large_tensor_are_few_and_a_block_is_a_small_part_of_it():
    blocks = Blocks.of((2048, 4608), memoryview(bytes(4 * 2048 * 4608)))  # a layer of ResNet-50, 36 MB
    assert len(blocks.sha256) // 64 == 64
    assert blocks.rows == 32
    assert blocks.around(0, 1) == (0, 32)
    assert blocks.around(31, 33) == (0, 64)
    assert blocks.around(32, 40) == (32, 64)


# --- without the model's code --------------------------------------------------------------------------------------

ZOO = {
    "vgg15": lambda: models.vgg15(num_classes=3),
    "resnet20": lambda: models.resnet20(num_classes=4, in_channels=1),
    "resnet34": lambda: models.resnet34(num_classes=5),
    "resnet56": lambda: models.resnet56(),
    "resnet50": lambda: models.resnet50(num_classes=7),
    "small_cnn": lambda: models.small_cnn((4, 6, 8), num_classes=3, in_channels=2),
    "small_vit": lambda: models.small_vit(num_classes=3, width=12, depth=1, heads=2, patch=8, image=16),
    "small_lm": lambda: models.small_lm(num_classes=16, width=12, depth=1, heads=2, context=8),
}


def first_layers(module, _):
    return module.weight.numel() < 10_000  # the others take seconds


LARGE = ("resnet34", "resnet50", "resnet56", "vgg15")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else []) for name in ZOO])
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
    artifact.save_size(net, net.plan(), tmp_path / "size")
    artifact.shrink(net.artifact(), net.plan()).save(tmp_path / "small")
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


def with_hook():
    model = models.small_cnn()
    model[2].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def with_pre_hook():
    model = models.resnet20()
    model.layer2[1].register_forward_pre_hook(lambda module, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    return model


def with_other_forward():
    model = models.small_cnn()
    model[2].forward = torch.tanh
    return model


def with_other_method():
    model = models.resnet20()
    convolve = type(model.conv1)._conv_forward
    model.conv1._conv_forward = types.MethodType(lambda self, *args: 2 * convolve(self, *args), model.conv1)
    return model


def with_other_block():
    model = models.resnet20()
    block = type(model.layer1[0])
    other = type(block.__name__, (block,), {"forward": lambda self, x: block.forward(self, x) + 1})
    model.layer1[0].__class__ = other
    return model


def with_other_root():
    model = models.small_cnn()
    model.__class__ = type("Sequential", (nn.Sequential,), {"forward": lambda self, x: -nn.Sequential.forward(self, x)})
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            replaced_head,
            "built by resnet20, changed since: .*'weight' of layer 'linear'",
        ),
        (other_activation, "built by small_cnn, changed since"),
        (with_hook, "built by small_cnn, changed since"),
        (with_pre_hook, "built by resnet20, changed since"),
        (with_other_forward, "built by small_cnn, changed since"),
        (with_other_method, "built by resnet20, changed since"),
        (with_other_block, "built by resnet20, changed since"),
        (with_other_root, "built by small_cnn, changed since"),
        (lambda: nn.Sequential(models.small_cnn()), "not the code"),
        (lambda: models.small_cnn()[:4], "not the code"),
    ],
)
def test_a_model_that_was_changed_has_to_be_given(build, message, tmp_path):
    net = decompose(build())
    net.save(tmp_path / "net")
    artifact.save_size(net, net.plan(ratio=0.5), tmp_path / "size")
    for file in ("net", "size"):
        with refused("model", Saying(f"{file} .*{message}"), kind=ModelNeededError):
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
    artifact.save_size(net, net.plan(ratio=0.5), folder / "size")
    artifact.shrink(net.artifact(), net.plan(ratio=0.7)).save(folder / "shrunk")
    for kind in KINDS:
        assert dn.load(folder / kind)(x).shape == (4, 10)
    return folder, x


KINDS = ("network", "size", "shrunk")
WAYS = (
    lambda path: dn.load(path),
    lambda path: dn.load(path, model=SMALL["small"]()),
    lambda path: dn.load(path, ratio=0.4),
    lambda path: dn.load(path, model=SMALL["small"](), macs=0.85),
    lambda path: artifact.outline(path),
    lambda path: artifact.read(path, ratio=0.4),
    lambda path: dn.load(path, params=0.8, align=2),
)
ALLOWED_TO_SAY = ("model", "macs", "params", "ratio", "ranks", "align")  # what the caller gave, or did not give


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
        assert refusal.path == path if isinstance(refusal, ArtifactError) else refusal.option in ALLOWED_TO_SAY, text
        return False
    assert not must_fail, f"damage of {name} was not found"
    floats = (
        {t.dtype for t in (*net.parameters(), *net.buffers()) if t.is_floating_point()} if is_module(net) else set()
    )
    if len(floats) == 1:  # a network may well be of several types, but this one would not run
        x = x.to(*floats)
        net.eval()(x)
        if isinstance(net, dn.DecomposedNet):
            with contextlib.suppress(BudgetError):
                net.resize_(**{net.selector.measure: max(0.5, net.selector.smallest_size)})
            net.resize_(ranks=dict.fromkeys(net.plan().ranks, 1))
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
        tensors[name] = raw[: end - begin].view(getattr(torch, DTYPES[entry["dtype"]])).reshape(entry["shape"])
    for _ in range(dice.choice((1, 1, 2))):
        name = dice.choice(sorted(tensors))
        tensors[name] = dice.choice(SPOIL)(tensors[name].clone(), dice).contiguous()
    made = {}
    position, parts = 0, []
    for name, tensor in tensors.items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        dtype = next(key for key, value in DTYPES.items() if getattr(torch, value) == tensor.dtype)
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
