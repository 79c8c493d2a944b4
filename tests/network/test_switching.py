"""A network in use is resized from other threads: every answer is that of one size that was in force meanwhile."""

import copy
import itertools
import os
import signal
import sys
import threading
import time
import traceback

import numpy as np
import pytest
import torch
from torch import nn

import decomposable as dn
from decomposable.core.layers import ChainLayers
from decomposable.network import original
from decomposable_edge import locks
from decomposable_edge.errors import BudgetError

pytestmark = pytest.mark.filterwarnings("ignore:batch normalisation (still has|has statistics|was calibrated)")

SIZES = [
    {"macs": 1.0},
    {"macs": 0.5},
    {"macs": 0.33},  # between two calibrated sizes
    {"macs": 0.5, "align": 4},
    {"params": 0.6},
    {"ratio": 0.2},
    {"ratio": 0.9},  # many layers hold a dense W̃
    {"ranks": {"0": 3, "3": 7}},
]


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Linear(16, 8),
    )
    for norm in (model[1], model[4], model[8]):
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
    return model.eval()


def loader():
    return [torch.randn(32, 3, 4, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)]


@pytest.fixture
def net():
    net = dn.decompose(build(), torch.zeros(2, 3, 4, 4))
    net.calibrate_(loader(), sizes=[0.25, 0.4, 0.6, 0.8])
    return net


@pytest.fixture
def x():
    return torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(9))


@pytest.fixture(autouse=True)
def threads_that_change_often():
    before, torch_threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before)
    torch.set_num_threads(torch_threads)


class Load:
    """Threads that ask, others that switch among sizes, and a log of both: when each began and when it ended."""

    def __init__(self, net, x, sizes=SIZES):
        self.net, self.x, self.sizes = net, x, sizes
        self.references = []
        with torch.no_grad():
            for size in sizes:
                net.resize_(**size)
                self.references.append(net(x).numpy())
        for one, other in itertools.combinations(self.references, 2):
            assert np.abs(one - other).max() > 1e-3  # or else an answer could not be told from another
        self.switches = [(-1, -1, len(sizes) - 1)]  # begin, end, the size
        self.answers = []  # begin, end, the answer
        self.errors = []
        self.is_over = threading.Event()

    def run(self, *, askers=3, switchers=2, switches=1000, ask=None, others=()):
        """Have that many switches done by each switcher while the askers ask; `others` are called all the time too."""
        ask = ask or (lambda: self.net(self.x))
        work = [lambda seed=i: self._switch(seed, switches) for i in range(switchers)]
        around = [lambda: self._ask(ask)] * askers + [lambda each=each: self._repeat(each) for each in others]
        switching, asking = (
            [threading.Thread(target=self._guard, args=(each,)) for each in kind] for kind in (work, around)
        )
        for thread in (*asking, *switching):
            thread.start()
        for thread in switching:
            thread.join()
        self.is_over.set()
        for thread in asking:
            thread.join()
        assert self.errors == []
        return self.verdicts()

    def _guard(self, work):
        try:
            with torch.no_grad():
                work()
        except BaseException as error:
            self.errors.append(error)
            self.is_over.set()

    def _switch(self, seed, count):
        for index in np.random.default_rng(seed).integers(0, len(self.sizes), count).tolist():
            begin = time.perf_counter_ns()
            self.net.resize_(**self.sizes[index])
            self.switches.append((begin, time.perf_counter_ns(), index))

    def _ask(self, ask):
        while not self.is_over.is_set():
            begin = time.perf_counter_ns()
            answer = ask()
            self.answers.append((begin, time.perf_counter_ns(), answer))

    def _repeat(self, work):
        while not self.is_over.is_set():
            work()

    def verdicts(self):
        """For every answer: "right", "torn" if it is of no size, "stale" if of one that was not in force."""
        begins, ends, sizes = (np.array(column) for column in zip(*self.switches, strict=True))
        return [verdict(begin, end, self.size_of(answer), begins, ends, sizes) for begin, end, answer in self.answers]

    def size_of(self, answer):
        """The one size whose answer this is; None if there is none."""
        near = [i for i, r in enumerate(self.references) if np.abs(answer.numpy() - r).max() <= 1e-6]
        return near[0] if len(near) == 1 else None


def verdict(begin, end, size, begins, ends, sizes):
    """A switch takes effect at some moment between its begin and its end.

    So one that had ended before another began is over for sure when that other one has ended. A size may have been
    in force during the request if some switch to it began before the request's end, and was not over for sure at its
    begin.
    """
    if size is None:
        return "torn"
    newest = max(begins[ends < begin], default=-2)
    could_be = (sizes == size) & (begins <= end) & (ends >= newest)
    return "right" if could_be.any() else "stale"


def test_every_answer_is_that_of_a_current_size(net, x):
    load = Load(net, x)
    verdicts = load.run()
    assert len(load.switches) == 2 * 1000 + 1
    assert set(verdicts) == {"right"}
    assert {load.size_of(answer) for _, _, answer in load.answers} == set(range(len(SIZES)))


@pytest.mark.slow
def test_the_load_notices_a_pass_that_reads_the_size_twice(net, x):
    load = Load(net, x)

    def torn():
        y = load.x
        for i in range(len(net.module)):
            y = net.module[i](y)  # the size that is in force now
        return y

    verdicts = load.run(switches=300, ask=torn)
    assert "torn" in verdicts
    assert load.errors == []


def test_the_load_notices_a_size_that_is_not_current_any_more(net, x):
    load = Load(net, x)
    kept = []

    def late():
        """The answer of the size before."""
        kept.append(net.extract())
        return kept[max(0, len(kept) - 40)](load.x)

    assert "stale" in load.run(askers=1, switches=200, ask=late)


@pytest.mark.parametrize(
    ("begin", "end", "size", "expected"),
    [
        (5, 8, 0, "right"),  # the first, before anything is switched
        (12, 30, 0, "right"),  # the switch to 1 has begun, and may take effect later than the request
        (16, 18, 0, "stale"),  # it has ended
        (12, 13, 1, "right"),
        (8, 9, 1, "stale"),  # it has not begun
        (41, 42, 2, "right"),  # two switches at once: either may have been the last
        (41, 42, 3, "right"),
        (41, 42, 1, "stale"),
        (36, 37, 1, "right"),
        (20, 50, None, "torn"),
    ],
)
def test_which_sizes_may_have_been_current(begin, end, size, expected):
    switches = [(-1, -1, 0), (10, 15, 1), (34, 40, 2), (35, 38, 3)]
    assert verdict(begin, end, size, *(np.array(column) for column in zip(*switches, strict=True))) == expected


@pytest.mark.slow
def test_saving_copying_extracting_and_calibrating_go_on_meanwhile(net, x, tmp_path):
    load = Load(net, x)
    twins, files, counter = [], [], itertools.count()

    def save():
        files.append(tmp_path / f"{next(counter)}.safetensors")
        net.save(files[-1])
        time.sleep(0.01)

    def duplicate():
        twins.append(copy.deepcopy(net))
        time.sleep(0.01)

    def calibrate():
        net.calibrate_(loader(), sizes=[0.25, 0.4, 0.6, 0.8])  # the same data: the same statistics

    verdicts = load.run(
        askers=2, switches=250, ask=lambda: net.extract()(x), others=[save, duplicate, calibrate, net.state_dict]
    )
    assert set(verdicts) == {"right"}
    plans = {}
    for i, size in enumerate(SIZES):
        plans[net.resize_(**size)] = load.references[i]
    assert len(files) > 2
    assert len(twins) > 2
    for other in (*twins, *(dn.load(path, model=build()) for path in files[:40])):
        np.testing.assert_allclose(other(x).detach().numpy(), plans[other.plan()], atol=1e-6)
        assert other.module is other._current.module
        np.testing.assert_allclose(other.extract()(x).detach().numpy(), plans[other.plan()], atol=1e-6)


def test_a_size_that_was_being_made_does_not_bring_the_old_mode_back(net, monkeypatch):
    is_making, go_on, finish = threading.Event(), threading.Event(), original.avoid_fast_paths_

    def pause(module):
        is_making.set()
        go_on.wait(timeout=60)
        finish(module)

    monkeypatch.setattr(original, "avoid_fast_paths_", pause)
    resizing, setting = threading.Thread(target=net.resize_, kwargs={"macs": 0.5}), threading.Thread(target=net.train)
    resizing.start()
    assert is_making.wait(timeout=60)
    setting.start()
    setting.join(timeout=0.2)  # it waits for the resize, or else is done before it
    go_on.set()
    resizing.join()
    setting.join()
    assert {module.training for module in net.modules()} == {True}


def test_what_is_copied_is_one_size_whatever_happens_meanwhile(net):
    net.resize_(macs=0.5)
    state = net.__getstate__()  # copy and pickle begin with it, and then take their time
    net.resize_(macs=0.3)
    assert state["_modules"]["module"] is state["_current"].module


def test_what_is_current_is_not_changed_by_using_it(net):
    net.resize_(ratio=1.0)
    net.calibrate_(loader(), sizes=[0.25, 0.8])
    parts = net.selector, net._statistics
    before = [set(vars(part)) for part in parts]
    net.resize_(macs=0.5)
    assert parts == (net.selector, net._statistics)
    assert [set(vars(part)) for part in parts] == before  # somebody may be copying them


# The mode and the type are changed in the same way


class Telling(nn.Module):
    """Scales by what it sees of the mode in each of two layers, and casts to the type of its own weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 40)
        self.noise, self.more = Doubling(), Doubling()
        self.register_buffer("kind", torch.zeros(1))

    def forward(self, x):
        y = self.second(self.noise(self.first(x.to(self.kind.dtype))))
        for _ in range(20):  # long enough for others to come in between
            y = self.second(y.tanh())
        return self.more(y).float()


class Doubling(nn.Module):
    def forward(self, x):
        return x * 2 if self.training else x


def telling():
    torch.manual_seed(0)
    net = dn.decompose(Telling().eval(), torch.zeros(1, 6))
    net.resize_(ratio=0.5)  # with factored layers, biases of the original, and a buffer
    return net


def under_way(net, x, changes, answers, rounds=60):
    """Passes in threads while others change the network; all answers, each of which must be near one of `answers`."""
    errors, seen, is_over = [], [], threading.Event()

    def ask():
        try:
            with torch.no_grad():
                while not is_over.is_set():
                    seen.append(net(x))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(rounds):
        changes[i % len(changes)]()
        time.sleep(0.001)
    is_over.set()
    for thread in threads:
        thread.join()
    assert errors == []
    which = {next((i for i, a in enumerate(answers) if torch.allclose(y, a, atol=1e-4)), None) for y in seen}
    assert None not in which  # one that is of two modes or types
    return which


class Pausing(nn.Module):
    """Stops a pass in the middle, where it is told to."""

    is_there, go_on = threading.Event(), threading.Event()

    def forward(self, x):
        self.is_there.set()
        self.go_on.wait(timeout=60)
        return x


@pytest.mark.parametrize("change", ["train", "double", "resize_"])
def test_a_pass_in_the_middle_of_which_the_network_is_changed_ends_as_it_began(change):
    torch.manual_seed(0)
    model = nn.Sequential(Doubling(), nn.Linear(6, 40), Pausing(), nn.Linear(40, 40), nn.LayerNorm(40), Doubling())
    Pausing.go_on.set()
    net, x, answers = dn.decompose(model.eval(), torch.zeros(1, 6)), torch.randn(4, 6), []
    net.resize_(ratio=0.5)
    with torch.no_grad():
        before = net(x)
    Pausing.go_on.clear()
    Pausing.is_there.clear()
    asking = threading.Thread(target=lambda: answers.append(net(x).detach()))
    asking.start()
    assert Pausing.is_there.wait(timeout=60)
    getattr(net, change)(**({"ratio": 0.1} if change == "resize_" else {}))
    Pausing.go_on.set()
    asking.join()
    assert torch.equal(answers[0], before)
    with torch.no_grad():
        after = net(x.double() if change == "double" else x)
    assert after.dtype != before.dtype or not torch.allclose(after, before, atol=1e-3)  # it was changed


def test_a_pass_that_is_under_way_ends_in_the_mode_it_began_with():
    net, x = telling(), torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        answers = [net.eval()(x), net.train()(x)]
    assert not torch.allclose(*answers, atol=1e-2)
    assert under_way(net, x, [net.train, net.eval], answers) == {0, 1}
    assert {module.training for module in net.modules()} == {net.training}


def test_a_pass_that_is_under_way_ends_in_the_type_it_began_with():
    net, x = telling(), torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        answer = net(x)
    changes = [net.double, lambda: net.resize_(ratio=0.5), net.float, net.eval]
    assert under_way(net, x, changes, [answer]) == {0}
    assert {p.dtype for p in net.parameters()} <= {torch.float32, torch.float64}
    assert len({p.dtype for p in net.parameters()}) == 1


def test_statistics_that_passes_in_training_mode_wrote_stay_when_the_mode_changes(net, x):
    net.resize_(macs=0.5)
    net.train()
    with torch.no_grad():
        net(x + 3)
    written = {name: buffer.clone() for name, buffer in net.named_buffers()}
    net.eval()
    assert written.keys() == dict(net.named_buffers()).keys()
    assert all(torch.equal(written[name], buffer) for name, buffer in net.named_buffers())


def test_setting_the_mode_that_is_set_replaces_nothing(net):
    module = net.module
    assert net.eval().module is module
    assert net.train().module is not module


# Forks


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_while_another_thread_resizes_leaves_a_child_that_can_resize(net, x):
    is_over = threading.Event()

    def switch():
        while not is_over.is_set():
            for size in SIZES[:4]:
                net.resize_(**size)

    switching = [threading.Thread(target=switch) for _ in range(2)]
    for thread in switching:
        thread.start()
    try:
        codes = [forked(lambda: resized_and_run(net, x)) for _ in range(12)]
    finally:
        is_over.set()
        for thread in switching:
            thread.join()
    assert codes == [0] * 12
    resized_and_run(net, x)  # the parent goes on as well


def resized_and_run(net, x):
    assert net.module is net._current.module
    with torch.no_grad():
        net(x)
        plan = net.resize_(macs=0.5)
        assert net(x).shape == (3, 8)
    assert net.plan() is plan


def forked(work):
    """Do it in a child; its exit code, or the number of the signal that ends it when it hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_lock_that_nobody_can_let_go_of_is_free_in_the_child(monkeypatch):
    monkeypatch.setattr(locks, "_MOST_SECONDS", 0.1)
    lock, is_held, let_go = locks.ForkLock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            let_go.wait(timeout=60)

    holding = threading.Thread(target=hold)
    holding.start()
    is_held.wait(timeout=60)

    def take():
        with lock, lock:
            pass

    with locks.ForkLock():  # one's own is no hindrance
        assert forked(take) == 0
    let_go.set()
    holding.join()
    take()


# A resize that fails


def state(net, x):
    with torch.no_grad():
        return net.plan(), net.module, net(x)


def assert_untouched(net, x, before):
    plan, module, y = state(net, x)
    assert plan is before[0]
    assert module is before[1]
    assert torch.equal(y, before[2])


@pytest.mark.parametrize("call", [1, 2, 4])
def test_a_resize_that_fails_halfway_changes_nothing(net, x, call, monkeypatch):
    net.resize_(macs=0.5)
    before = state(net, x)
    calls, make = itertools.count(1), ChainLayers.build

    def fail(self, *arguments):
        if next(calls) == call:
            raise MemoryError
        return make(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ChainLayers, "build", fail)
        with pytest.raises(MemoryError):
            net.resize_(ratio=0.1)
    assert_untouched(net, x, before)
    net.resize_(ratio=0.1)
    assert net.plan() == net.plan(ratio=0.1)


def test_a_resize_whose_statistics_fail_changes_nothing(net, x, monkeypatch):
    net.resize_(macs=0.5)
    before = state(net, x)

    def fail(plan, known):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("decomposable.network.original.statistics_at", fail)
        with pytest.raises(MemoryError):
            net.resize_(macs=0.4)
    assert_untouched(net, x, before)


@pytest.mark.parametrize("size", [{"macs": 0.001}, {"macs": 0.12, "align": 8}])
def test_an_impossible_size_changes_nothing_and_frees_the_lock(net, x, size):
    before = state(net, x)
    with pytest.raises(BudgetError):
        net.resize_(**size)
    assert_untouched(net, x, before)
    other = threading.Thread(target=net.resize_, kwargs={"macs": 0.5})
    other.start()
    other.join(timeout=60)
    assert net.plan() == net.plan(macs=0.5)
