"""The session on a device: the same numbers as PyTorch at any size, without PyTorch."""

import copy
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from sealing import unseal
from torch import nn

import decomposable as dn
from decomposable_edge import AnySizeSession
from decomposable_edge.building import build
from decomposable_edge.errors import BudgetError, DecomposableError, InvalidArgumentError, how_to_install
from decomposable_edge.network import open_network
from decomposable_edge.onnx_runtime import default_threads, usable_cores
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.plans import SizeRequest

SRC = Path(__file__).resolve().parents[2] / "src"
SIZES = [
    {"macs": 1.0},
    {"macs": 0.95},
    {"macs": 0.8},
    {"macs": 0.62},
    {"macs": 0.3},
    {"params": 0.5},
    {"ratio": 0.9},
    {"ratio": 0.2},
    {"ranks": {"body": 2, "hidden": 15}},
    {"macs": 200_000},
]


@pytest.fixture(scope="module")
def session(bundle):
    return AnySizeSession(bundle)


@pytest.fixture
def wide_bundle(tmp_path):
    """A network whose ranks "auto" rounds, and its file."""
    torch.manual_seed(0)
    layers = [nn.Linear(300, 400), nn.BatchNorm1d(400), nn.Linear(400, 300), nn.ReLU(), nn.Linear(300, 8)]
    net = dn.decompose(nn.Sequential(*layers).eval(), example_input=torch.randn(8, 300))
    net.calibrate_([torch.randn(64, 300)])
    net.save(tmp_path / "wide.safetensors", onnx=True)
    return tmp_path / "wide.safetensors", net


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_size_gives_the_numbers_of_pytorch(session, net, expected, x, size):
    """Unrounded, and by default, with `align="auto"`; given ranks are never rounded."""
    for rounding in ({"align": 1}, {}):
        plan = session.resize(**size, **rounding)
        np.testing.assert_allclose(session.run(x), expected(**size, **rounding), rtol=1e-5, atol=1e-5)
        assert plan == net.plan() == session.plan()


@pytest.mark.filterwarnings("ignore:batch normalisation has statistics of ranks")
def test_what_pytorch_tells_is_what_the_device_tells_takes_and_what_is_exported(wide_bundle, tmp_path):
    path, net = wide_bundle
    session = AnySizeSession(path)
    for way, align in itertools.product(("macs", "params", "ratio"), (None, "auto", 1, 8)):
        size = {way: 0.5, "align": align}
        told = net.plan(**size)
        assert net.plan().is_full  # telling changes nothing
        assert session.plan().is_full
        assert (session.plan(**size), session.plan(**size).align) == (told, told.align)
        assert session.resize(**size) == session.plan() == AnySizeSession(path, **size).plan() == told
        assert session.resize(session.selector.full_plan()).is_full
        assert session.resize(told) == session.plan() == told
        assert net.resize_(**size) == net.plan() == told
        assert session.resize(macs=1.0) == net.resize_(macs=1.0)
    told = net.plan(macs=0.5)
    report = dn.export_onnx(net, tmp_path / "one.onnx", macs=0.5)
    assert (report.macs, report.ranks) == (told.macs, dict(told.ranks))


def test_auto_is_the_default_of_budgets_and_ratios_and_ranks_are_literal(wide_bundle, bundle):
    """And it needs no statistics of its own: nothing warns."""
    path, net = wide_bundle
    session = AnySizeSession(path)
    auto, plain = session.plan(macs=0.5), session.plan(macs=0.5, align=1)
    assert (auto.align, plain.align) == ("auto", 1)
    assert auto.ranks != plain.ranks
    assert session.plan(macs=0.5, align=None) == session.plan(macs=0.5, align="auto") == auto
    assert session.resize(ratio=0.4) == net.plan(ratio=0.4, align=1)
    ranks = {"0": 33, "2": 21}
    assert session.resize(ranks=ranks) == AnySizeSession(path, ranks=ranks).plan() == net.plan(ranks=ranks)
    assert AnySizeSession(path).plan().is_full
    assert AnySizeSession(path, align="auto").plan().is_full
    with pytest.raises(InvalidArgumentError) as caught:
        session.resize(AnySizeSession(bundle).plan())
    assert (caught.value.option, caught.value.allowed) == ("plan", "what its plan() returns")


def test_a_plan_is_given_alone(bundle):
    session = AnySizeSession(bundle)
    for wrong in ({"macs": 0.5}, {"align": 8}):
        with pytest.raises(InvalidArgumentError) as caught:
            session.resize(session.plan(macs=0.5), **wrong)
        assert (caught.value.option, caught.value.came) == ("plan", f"a plan, {next(iter(wrong))}")
    with pytest.raises(InvalidArgumentError) as caught:
        session.resize(0.5)
    assert (caught.value.option, caught.value.came) == ("plan", "float")
    with pytest.raises(InvalidArgumentError) as caught:
        session.resize()
    assert (caught.value.option, caught.value.came) == ("size", "none")
    assert session.plan().is_full


@pytest.mark.parametrize("name", ["resize", "plan"])
def test_an_unknown_keyword_is_refused(bundle, name):
    session = AnySizeSession(bundle)
    for function in (getattr(session, name), partial(AnySizeSession, bundle)):
        with pytest.raises(TypeError) as caught:
            function(mac=0.5)
        assert (caught.value.option, caught.value.came) == ("mac", 0.5)
        assert caught.value.allowed.startswith("macs, params, ratio, ranks, latency_ms, align, batch")
    assert session.plan().is_full


@pytest.mark.filterwarnings("ignore:batch normalisation has statistics of ranks")
def test_measuring_takes_auto_and_times_of_any_rounding_can_be_asked_for(wide_bundle):
    path, net = wide_bundle
    session = AnySizeSession(path, threads=1)
    for asked, align in (({}, "auto"), ({"align": 1}, 1), ({"align": 8}, 8)):
        [entry] = session.measure([0.5], seconds=0, **asked).entries
        assert entry.align == align
        assert entry.sizes[0].macs == net.plan(macs=0.5, align=align).macs
        session._latency = None  # read again from beside the file
        slower = max(entry.sizes[0].median_ms, 1e-6)
        plan = session.resize(latency_ms=slower)
        assert plan.is_full or plan == net.plan(macs=entry.size_for(slower), align=align)


@pytest.mark.parametrize("content", ["", "{", '{"format": 1, "machines": 3}'])
def test_a_corrupt_latency_profile_can_be_replaced_by_measuring_again(content, wide_bundle):
    beside = LatencyProfile.path_beside(wide_bundle[0])
    beside.write_text(content)
    session = AnySizeSession(wide_bundle[0], threads=1)
    with pytest.raises(DecomposableError, match=r"not a latency profile .*measure here with.*which replaces it"):
        session.resize(latency_ms=5)
    with pytest.warns(UserWarning, match=r"latency\.json: it was damaged"):
        session.measure([0.5], seconds=0)
    assert session.resize(latency_ms=1e6).is_full
    assert AnySizeSession(wide_bundle[0], threads=1, latency_ms=1e6).plan().is_full


@pytest.mark.parametrize(("value", "threads"), [("1", 1), ("3", 3), ("2,1", 2), ("", None), ("0", None), ("x", None)])
def test_it_takes_as_many_threads_as_pytorch_would(value, threads, monkeypatch):
    """So that what `decomposable bench` has measured holds for a session that was told nothing."""
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert default_threads() == (usable_cores() if threads is None else threads)


@pytest.mark.filterwarnings("ignore:batch normalisation has statistics of ranks")
def test_aligned_ranks_are_those_of_pytorch(session, net, expected, x):
    plan = session.resize(macs=0.6, align=4)
    np.testing.assert_allclose(session.run(x), expected(macs=0.6, align=4), rtol=1e-5, atol=1e-5)
    assert plan == net.plan()
    assert all(rank % 4 == 0 or name in plan.dense for name, rank in plan.ranks.items())


def test_ranks_that_were_not_calibrated_are_said_to_be_so_once(bundle, x):
    with pytest.warns(UserWarning, match=r"not rounded to multiples of 4.*\(loader, align=4\).*save it again"):
        session = AnySizeSession(bundle, macs=0.6, align=4)
    session.resize(macs=0.7, align=4)
    AnySizeSession(bundle, macs=0.6)


@pytest.mark.slow
def test_rounded_ranks_have_their_own_statistics(tmp_path, x):
    torch.manual_seed(0)
    net = dn.decompose(dn.models.small_cnn((16, 16, 24)).eval(), example_input=torch.zeros(1, 1, 8, 8))
    batches = [torch.randn(32, 1, 8, 8) * 3 + 1]
    net.calibrate_(batches, sizes=[0.3, 0.5, 0.7])
    net.calibrate_(batches, sizes=[0.4, 0.5, 0.6, 0.7], align=8)
    net.save(tmp_path / "net.safetensors", onnx=True)
    session, image = AnySizeSession(tmp_path / "net.safetensors"), torch.randn(3, 1, 8, 8)
    for macs in (0.45, 0.5, 0.55):
        plan = session.resize(macs=macs, align=8)
        assert plan == net.resize_(macs=macs, align=8)
        np.testing.assert_allclose(session.run(image.numpy()), net(image), rtol=1e-4, atol=1e-4)


def test_it_starts_at_full_size_or_at_the_one_asked_for(bundle, x):
    assert AnySizeSession(bundle).plan().is_full
    session = AnySizeSession(bundle, macs=0.4, threads=1)
    assert session.plan() == session.plan(macs=0.4)
    assert "0.3" in repr(session)
    assert session.run(x[:1]).shape == (1, 5)


def test_the_graph_has_no_weights_and_names_them_as_the_file_does(bundle):
    model, _, arrays = unseal(bundle)
    taken = {name for node in model.graph.node for name in node.input}
    assert {"first/stem", "second/stem", "first/hidden", "second/head", "state/hidden.bias"} <= taken & arrays.keys()
    assert sum(tensor.ByteSize() for tensor in model.graph.initializer) < 200  # axes to take the mean of
    assert {"first/stem", "second/head"} <= {node.name for node in model.graph.node}


def test_the_file_holds_no_trace_of_the_machine_that_made_it(bundle):
    content = bundle.read_bytes()
    assert b".py" not in content
    assert str(SRC).encode() not in content


def test_the_file_is_the_one_that_pytorch_loads(bundle, expected, net, x):
    loaded = dn.load(bundle, model=type(net._base)())
    loaded.resize_(macs=0.5)
    with torch.no_grad():
        np.testing.assert_array_equal(loaded(torch.from_numpy(x)).numpy(), expected(macs=0.5))


def test_one_node_where_dense_is_cheaper_and_folded_normalisation(bundle):
    contents = open_network(bundle)
    full = build(contents, contents.selector.full_plan())
    small = build(contents, contents.selector.smallest_plan())
    count = {
        name: [node.op_type for node in onnx.load_from_string(model.content).graph.node]
        for name, model in (("full", full), ("small", small))
    }
    for operations, layers in ((count["full"], 1), (count["small"], 2)):
        assert (operations.count("Conv"), operations.count("Gemm")) == (3 * layers, 2 * layers)
        assert operations.count("BatchNormalization") == 1  # what early_bn takes is used elsewhere, too


def test_factors_are_not_copied(bundle):
    contents = open_network(bundle)
    plan = contents.selector.plan_for(SizeRequest(ratio=0.3))
    weights = build(contents, plan).weights
    layer = next(layer for layer in contents.layers if layer.name == "hidden")
    assert plan.ranks["hidden"] < layer.kept[0]
    kept, _ = layer.first((plan.ranks["hidden"],))
    assert np.shares_memory(weights.get("first/hidden", kept), kept)


def test_recent_sizes_are_kept_and_the_oldest_goes(bundle):
    session = AnySizeSession(bundle, keep=2)
    full = session._current
    session.resize(macs=0.5)
    session.resize(macs=1.0)
    assert session._current is full
    session.resize(macs=0.4)
    assert [plan.macs_fraction for plan in session.kept] == [1.0, session.plan().macs_fraction]
    session.resize(macs=0.5)
    session.resize(macs=1.0)
    assert session._current is not full


def test_a_resize_that_fails_leaves_the_size(session, x):
    session.resize(macs=0.5)
    before, plan = session.run(x), session.plan()
    for wrong, error in (
        ({"macs": 0.001}, BudgetError),
        ({"macs": 2.5}, InvalidArgumentError),
        ({"macs": 0.5, "params": 0.5}, InvalidArgumentError),
        ({}, InvalidArgumentError),
        ({"ranks": {"nothing": 1}}, InvalidArgumentError),
        ({"macs": 0.5, "align": 0}, InvalidArgumentError),
    ):
        with pytest.raises(error):
            session.resize(**wrong)
    with pytest.raises(InvalidArgumentError, match="got str; allowed: a RankPlan alone"):
        session.resize("full")
    assert session.plan() is plan
    np.testing.assert_array_equal(session.run(x), before)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (np.zeros((1, 3, 12, 12)), "type float64"),
        (np.zeros((1, 3, 12, 13), np.float32), "12, 13"),
        (np.zeros((3, 12, 12), np.float32), "allowed: batch × 3 × 12 × 12"),
        ([1.0], "a list"),
        ({"other": np.zeros(1)}, "allowed: input"),
    ],
)
def test_a_wrong_input_is_refused_in_one_line(session, wrong, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        session.run(wrong)
    assert "\n" not in str(caught.value)


def test_inputs_by_name_and_what_it_says_of_itself(session, x):
    np.testing.assert_array_equal(session.run({"input": x}), session.run(x))
    assert [(p.name, p.shape, p.dtype) for p in session.inputs] == [("input", ("batch", 3, 12, 12), "float32")]
    assert [(p.name, p.shape) for p in session.outputs] == [("output", ("batch", 5))]
    fractions = [plan.macs_fraction for plan in session.sizes]
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[0] == 1.0
    assert session.sizes[-1] == session.selector.smallest_plan()


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 0},
        {"threads": True},
        {"threads": 100_000},
        {"keep": 0},
        {"keep": 1.5},
        {"providers": "CPUExecutionProvider"},
        {"providers": ["CPUExecutionProvider", "NoSuchProvider"]},
        {"providers": []},
        {"session_options": dict},
    ],
)
def test_options_that_are_not_allowed(bundle, options):
    with pytest.raises(InvalidArgumentError, match=next(iter(options))) as caught:
        AnySizeSession(bundle, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("options", [{"align": "nonsense"}, {"align": 8}, {"batch": 1}])
def test_what_rounds_a_size_is_refused_without_one(bundle, options):
    with pytest.raises(InvalidArgumentError, match="exactly one of macs"):
        AnySizeSession(bundle, **options)


def test_the_threads_it_tells_are_those_that_run(bundle, x):
    made = []

    def two_threads():
        made.append(onnxruntime.SessionOptions())
        made[-1].intra_op_num_threads = 2
        return made[-1]

    session = AnySizeSession(bundle, session_options=two_threads)
    assert (session.threads, made[-1].intra_op_num_threads) == (2, 2)
    session = AnySizeSession(bundle, session_options=two_threads, threads=1)
    assert (session.threads, made[-1].intra_op_num_threads) == (1, 1)
    made_by_itself = AnySizeSession(bundle)
    assert made_by_itself._current.runtime.get_session_options().intra_op_num_threads == made_by_itself.threads
    assert 1 <= made_by_itself.threads <= (os.cpu_count() or 1)
    providers = ["CPUExecutionProvider", ("CPUExecutionProvider", {})]
    assert AnySizeSession(bundle, providers=providers[1:]).run(x).shape == (7, 5)


def test_either_order_of_bytes(session, x):
    session.resize(macs=0.5)
    np.testing.assert_array_equal(session.run(x.astype(">f4")), session.run(x))


def test_a_network_without_statistics_of_its_own_says_so_once(tmp_path, x):
    torch.manual_seed(0)
    net = dn.decompose(dn.models.small_cnn((8, 8, 8)).eval(), example_input=torch.zeros(1, 1, 8, 8))
    with pytest.warns(UserWarning, match="batch normalisation still has the full network's statistics") as caught:
        net.save(tmp_path / "net.safetensors", onnx=True)
    assert [warning.filename for warning in caught] == [__file__]
    session = AnySizeSession(tmp_path / "net.safetensors")
    with pytest.warns(
        UserWarning, match=r"batch normalisation still has .*calibrate_\(loader\) once.*, and save it again"
    ):
        session.resize(ratio=0.5)
    session.resize(ratio=0.4)


@pytest.mark.parametrize(
    "wrong", [{"seconds": "a"}, {"seconds": -1}, {"sizes": 0.5}, {"sizes": "0.5"}, {"sizes": ["a"]}]
)
def test_measuring_what_cannot_be_is_refused_at_once(session, wrong):
    with pytest.raises(InvalidArgumentError, match=f"measure: {next(iter(wrong))}=") as caught:
        session.measure(**wrong)
    assert "\n" not in str(caught.value)


def test_options_of_the_runtime_are_made_for_every_size(bundle, x):
    made = []

    def options():
        made.append(onnxruntime.SessionOptions())
        return made[-1]

    session = AnySizeSession(bundle, session_options=options, threads=1)
    session.resize(macs=0.5)
    session.run(x)
    assert [each.intra_op_num_threads for each in made] == [1, 1]


def test_prepare_reads_dense_weights_once(bundle):
    session = AnySizeSession(bundle, ratio=0.1)
    session.prepare()
    layers = session._bundle.layers
    kept = [layer.weight() for layer in layers]
    session.resize(macs=1.0)
    assert all(layer.weight() is weight for layer, weight in zip(layers, kept, strict=True))


def test_measuring_and_then_a_size_by_its_latency(bundle, tmp_path, x):
    path = shutil.copy(bundle, tmp_path / "small.safetensors")
    session = AnySizeSession(path, threads=1)
    with pytest.raises(InvalidArgumentError, match="no latency profile"):
        session.resize(latency_ms=5)
    profile = session.measure([0.5, 0.3], seconds=0.05)
    assert session.plan().is_full
    [entry] = profile.entries
    assert (entry.runtime, entry.batch, entry.threads, len(entry.sizes)) == ("onnxruntime", 1, 1, 3)
    assert session.resize(latency_ms=1e6).is_full
    assert AnySizeSession(path, latency_ms=1e6, batch=1, threads=1).plan().is_full  # it lies beside the file
    with pytest.raises(DecomposableError, match="batch 3"):
        AnySizeSession(path, latency_ms=1e6, batch=3, threads=1)
    with pytest.raises(BudgetError, match="too small"):
        session.resize(latency_ms=1e-9)
    with pytest.raises(DecomposableError, match="no alignments were tried"):
        session.resize(macs=0.5, align="measured")
    session.measure([0.5, 0.3], seconds=0.05, align="measured")
    assert session.resize(macs=0.6, align="measured").macs_fraction <= 0.6
    with pytest.raises(InvalidArgumentError, match="batch"):
        session.measure(batch=0)


WITHOUT_TORCH = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("torch", "safetensors", "onnxscript", "onnx_ir"):
                raise ImportError(f"{name} is blocked")

    sys.meta_path.insert(0, Blocked())
    import numpy as np
    from decomposable_edge import AnySizeSession
    from decomposable import RankPlan

    path, x, out = sys.argv[1:]
    session = AnySizeSession(path)
    results = []
    for size in ({"macs": 1.0}, {"macs": 0.62}, {"params": 0.5}, {"ratio": 0.2}):
        assert isinstance(session.resize(**size), RankPlan)
        results.append(session.run(np.load(x)))
    session.measure([0.5], seconds=0)
    session.resize(latency_ms=1000)
    np.save(out, results)
    assert not {"torch", "safetensors"} & set(sys.modules)
"""


def test_a_package_that_is_missing_is_named_in_one_line():
    program = """
        import sys
        sys.modules["onnxruntime"] = None
        try:
            from decomposable_edge import AnySizeSession
        except ImportError as error:
            print(type(error).__name__, error)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, check=True, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True
    )
    assert done.stdout.startswith("MissingExtraError onnxruntime is not installed, which a device needs; run")
    assert done.stdout.endswith(f"{how_to_install('onnx')}\n")


def test_it_runs_where_torch_is_not(bundle, expected, x, tmp_path):
    copy = shutil.copy(bundle, tmp_path / "small.safetensors")
    np.save(tmp_path / "x.npy", x)
    arguments = [str(copy), str(tmp_path / "x.npy"), str(tmp_path / "y.npy")]
    command = [sys.executable, "-c", textwrap.dedent(WITHOUT_TORCH), *arguments]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(SRC)})
    sizes = ({"macs": 1.0}, {"macs": 0.62}, {"params": 0.5}, {"ratio": 0.2})
    for found, size in zip(np.load(tmp_path / "y.npy"), sizes, strict=True):
        np.testing.assert_allclose(found, expected(**size), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_fork_while_another_thread_resizes_leaves_a_child_that_can_resize_and_run(bundle, expected, x, threads):
    right = {size: expected(macs=size) for size in (0.8, 0.5, 0.3)}
    session, is_over = AnySizeSession(bundle, threads=threads, keep=1), threading.Event()

    def switch():
        while not is_over.is_set():
            for size in (0.3, 0.8):
                session.resize(macs=size, align=1)

    def use():
        session.run(x)  # whatever is in force
        for size in (0.5, 0.3):  # and letting go of those of the parent
            session.resize(macs=size, align=1)
            np.testing.assert_allclose(session.run(x), right[size], atol=1e-4)

    switching = threading.Thread(target=switch)
    switching.start()
    try:
        assert [forked(use) for _ in range(4)] == [0] * 4
    finally:
        is_over.set()
        switching.join()
    use()


def forked(work):
    """Do it in a child, which ends as those of multiprocessing do; its exit code."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)  # where it hangs
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture(scope="module")
def sparse(net, tmp_path_factory):
    """A bundle with statistics of few sizes: what one of those costs, and the next size above it that is not near."""
    costs = net.selector.all_costs().tolist()
    pairs = [(a, b) for a, b in itertools.pairwise(costs) if 1.02 < b / a < 1.1]
    below, here = pairs[len(pairs) // 2]
    twin = copy.deepcopy(net)
    twin.forget_statistics_()
    twin.calibrate_([torch.randn(16, 3, 12, 12)], sizes=[below, 1.0])
    path = tmp_path_factory.mktemp("sparse") / "sparse.safetensors"
    twin.save(path, onnx=True)
    return path, below, here, min(costs)


def test_a_size_far_from_every_calibrated_one_steps_down_on_the_device_too(sparse):
    path, below, here, _ = sparse
    session = AnySizeSession(path)
    for align in ("auto", 1):  # without a warning, which would be an error here
        plan = session.resize(macs=here, align=align)
        assert plan.macs == below
    assert plan.instead_of == here / plan.full_macs
    assert "the nearest calibrated size below" in str(plan)


def test_or_it_warns_on_the_device_too(sparse):
    path, _, _, smallest = sparse
    session = AnySizeSession(path)
    with pytest.warns(UserWarning, match=r"too far from this size of .*x to know its statistics.*save it again"):
        session.resize(macs=smallest)
    session.resize(macs=0.9)  # once


def test_no_size_of_a_grid_warns_or_steps_down_on_the_device(bundle):
    session = AnySizeSession(bundle)
    for size in (0.9, 0.71, 0.5, 0.33, 0.21):
        assert session.resize(macs=size).instead_of is None
