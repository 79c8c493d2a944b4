"""One comparison by many: shards of an array of jobs, and a Ray cluster."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import decomposable as dn
import decomposable_lab as lab
from decomposable.recipes import default_settings, find
from decomposable.training import methods
from decomposable.training.runs import RunError
from decomposable_edge.errors import InvalidArgumentError
from decomposable_lab.comparison.parts import plan
from decomposable_lab.comparison.running import How, what_is_missing
from decomposable_lab.comparison.scheduling import work_off
from decomposable_lab.comparison.sharding import Shard, bundles, held_alone
from decomposable_lab.comparison.watching import Watch, Watchers
from decomposable_lab.exhibits.running import ordered

SOURCE = Path(dn.__file__).parents[1]
SOURCES = os.pathsep.join([str(SOURCE), str(Path(lab.__file__).parents[1])])
LIMIT = 400  # seconds until a cluster that hangs is ended, and the test fails
QUICK = ["epochs=1", "train_images=500", "calibration_images=100", "sizes=1,0.5", "evaluate_every=1"]


@pytest.fixture
def everything(tmp_path):
    """What all methods train with two seeds."""
    return plan("digits", default_settings(find("digits")), list(methods.METHODS), (0, 1), tmp_path).parts


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_every_training_is_in_one_shard_with_what_it_starts_from(everything, count):
    shares = [Shard(number, count).own(everything) for number in range(1, count + 1)]
    names = [part.name for share in shares for part in share]
    assert sorted(names) == sorted(part.name for part in everything)
    for share in shares:
        paths = [part.path for part in share]
        for place, part in enumerate(share):
            assert all(path in paths[:place] for path in part.needs)
    if count <= len(bundles(everything)):
        assert all(shares)


def test_shares_do_not_depend_on_what_is_done(everything, tmp_path):
    before = [part.name for part in Shard(2, 3).own(everything)]
    folder = everything[0].path
    folder.mkdir(parents=True)
    (folder / "record.json").write_text("{}")
    assert [part.name for part in Shard(2, 3).own(everything)] == before


def test_the_trainings_of_several_folders_are_dealt_out_on_and_on(everything):
    together = bundles(everything)
    for before in range(5):
        shares = [Shard(number, 3).own(everything, before) for number in (1, 2, 3)]
        assert sum(map(len, shares)) == len(everything)
        assert together[0][0] in shares[before % 3]


@pytest.mark.parametrize("text", ["", "1", "0/2", "3/2", "1/0", "a/b", "1/2/3", "-1/2", "1.5/2", "²/3", "1/9999999"])
def test_what_is_no_shard_is_refused(text, call, tmp_path):
    code, _, err = call("compare", "digits", "--out", tmp_path / "out", f"--shard={text}")
    assert code == 2
    assert f"--shard {text}; allowed: K/N with 1 <= K <= N, as in 2/8" in err
    assert not (tmp_path / "out").exists()


def test_engines_and_their_options_are_checked(call, tmp_path):
    code, _, err = call("compare", "digits", "--out", tmp_path / "out", "--engine", "slurm")
    assert (code, "--engine slurm: unknown; allowed: local, ray" in err) == (2, True)
    code, _, err = call("compare", "digits", "--out", tmp_path / "out", "--address", "here:1")
    assert (code, "--address here:1: of a Ray cluster; allowed: with --engine ray" in err) == (2, True)
    with pytest.raises(InvalidArgumentError, match="--jobs 0; allowed: an int of at least 1"):
        How(jobs=0)


def test_a_shard_does_not_run_twice_nor_beside_another_split(tmp_path):
    with Shard(1, 3).held(tmp_path), Shard(2, 3).held(tmp_path):
        with pytest.raises(RunError, match="--shard 1/3: another process is running it"), Shard(1, 3).held(tmp_path):
            pass
        with pytest.raises(RunError, match=r"--shard 1/2: shard ./3 is running in"), Shard(1, 2).held(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == []
    with Shard(1, 2).held(tmp_path):
        pass


def test_who_wants_a_folder_alone_waits_for_no_shard(tmp_path):
    refused = pytest.raises(RunError, match="another process is running in it")
    with Shard(1, 2).held(tmp_path), Shard(2, 2).held(tmp_path), refused, held_alone(tmp_path):
        pass
    refused = pytest.raises(RunError, match="another process is running in")
    with held_alone(tmp_path), refused, Shard(1, 2).held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_told():
    assert what_is_missing([], Shard(1, 2)) is None
    assert what_is_missing(["a/0"], Shard(1, 2)) == "missing, of other shards than 1/2: 1 trainings (a/0)"
    assert what_is_missing(list("abcdefg"), None) == "missing: 7 trainings (a, b, c, d, e and 2 more)"


def test_shards_fill_one_folder(call, tmp_path):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    out = tmp_path / "out"
    common = ["compare", "digits", "--out", out, "--methods", "plain,us-net", "--jobs", 1]
    code, said, _ = call(*common, "--shard", "2/2", "--json", "--set", *QUICK)
    assert code == 0
    first = json.loads(said)
    assert list(first["methods"]) == ["us-net"]
    assert first["missing"] == ["plain/0"]
    assert not (out / "plain").exists()
    before = (out / "us-net" / "0" / "record.json").read_bytes()
    code, said, _ = call(*common, "--shard", "1/2", "--set", *QUICK)
    assert (code, "missing" in said) == (0, False)
    code, said, err = call(*common, "--json", "--set", *QUICK)
    assert "2 of 2 trainings are done already" in err
    both = json.loads(said)
    assert set(both["methods"]) == {"plain", "us-net"}
    assert "missing" not in both
    assert (out / "us-net" / "0" / "record.json").read_bytes() == before
    assert not list(out.glob(".*"))


def test_a_shard_of_an_exhibit_has_its_share_of_every_group(tmp_path):
    order = ordered("all", "laptop", out=tmp_path)
    before, dealt, all_ = 0, [], []
    for group in order.groups:
        comparison, _ = order.prepared(group)
        dealt += [(group.folder, p.name) for n in (1, 2, 3) for p in Shard(n, 3).own(comparison.parts, before)]
        all_ += [(group.folder, part.name) for part in comparison.parts]
        before += len(bundles(comparison.parts))
    assert sorted(dealt) == sorted(all_)


class _Engine:
    """Workers that are done at once, or die: what any engine has to offer."""

    def __init__(self, ends):
        self.ends = dict(ends)
        self.made = []

    def worker(self):
        self.made.append(_Hand(self))
        return self.made[-1]

    def speaking(self, workers, timeout):
        return list(workers)


class _Hand:
    def __init__(self, engine):
        self.engine, self.part, self.is_closed = engine, None, None

    def begin(self, part):
        self.part, self.words = part, [("line", "training: step 1"), ("said", "a word"), self._end(part)]

    def _end(self, part):
        return self.engine.ends.get(part.name) or ("done", {"sizes": [], "training_seconds": 1.0})

    def ask_to_stop(self):
        pass

    def message(self):
        return self.words.pop(0)

    def close(self, *, at_once):
        self.is_closed = True


def test_any_engine_speaks_the_protocol(everything):
    parts = [part for part in everything if part.method in ("plain", "us-net", "elastic")]
    said, details = [], []
    engine = _Engine({"us-net/0": ("failed", "out of luck"), "elastic/1": ("died", "its process was killed")})
    watch = Watch(parts, 2, Watchers(say=said.append, detail=details.append))
    assert work_off(parts, watch, 2, engine) == {
        "us-net/0": "out of luck",
        "elastic/1": "its process was killed",
    }
    assert watch.done == len(parts) - 2
    assert len(details) == len(parts)
    assert sum(hand.is_closed is None for hand in engine.made) == 1  # the one that died


def test_ray_is_an_extra(call, tmp_path, monkeypatch):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    monkeypatch.setitem(sys.modules, "ray", None)
    options = ("--methods", "plain", "--engine", "ray", "--set", *QUICK)
    code, _, err = call("compare", "digits", "--out", tmp_path / "out", *options)
    assert code == 1
    assert "Ray is not installed; run in a checkout of decomposable: pip install -c constraints.txt '.[ray]'" in err


MORTAL = """
import os, signal
from dataclasses import replace
from pathlib import Path
from decomposable.recipes import cross_entropy, default_settings
from decomposable.recipes.small import digits

steps = [0]


def loss(net, batch):
    steps[0] += 1
    if steps[0] == 9 and not Path(os.environ["MARK"]).exists():
        Path(os.environ["MARK"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(net, batch)


def recipe(settings=default_settings(digits)):
    return replace(digits(settings), loss=loss)
"""


@pytest.mark.slow
def test_a_cluster_of_two_workers_trains_what_is_missing_though_one_is_killed(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed")
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    out = tmp_path / "out"
    program = tmp_path / "program.py"
    program.write_text(
        "import ray, sys\n"
        "from decomposable_lab.commands.main import main\n"
        "ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address='127.0.0.1')\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "mortal.py").write_text(MORTAL)
    arguments = [
        *("compare", "mortal:recipe", "--out", "out", "--methods", "plain,us-net,width", "-v", "--engine", "ray"),
        *("--checkpoint-seconds", "0"),
    ]
    path = os.pathsep.join([SOURCES, str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MARK": str(tmp_path / "mark")}
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments, "--set", *QUICK],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = threading.Timer(LIMIT, os.killpg, (process.pid, 9))
    end.start()
    try:
        _, err = process.communicate()
        assert end.is_alive(), f"it took more than {LIMIT} s\n{err}"
    finally:
        end.cancel()
    assert process.returncode == 0, err
    content = json.loads((out / "comparison.json").read_text())
    assert set(content["methods"]) == {"plain", "us-net", "width"}
    assert content["failed"] == {}
    assert "epoch 1/1" in err  # told by the tasks
    assert "4/4" in err
    assert (tmp_path / "mark").exists()
    assert "resuming at step " in err  # the one that was killed, where Ray started it again
