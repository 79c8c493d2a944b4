"""Rival methods in several processes: four train as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import decomposable as dn
import decomposable_lab as lab

RECIPES = Path(__file__).resolve().parents[3] / "tests" / "training"


def train(out, method, count):
    path = os.pathsep.join([*(str(Path(package.__file__).parents[1]) for package in (dn, lab)), str(RECIPES)])
    arguments = ["train", "shared_recipe:bare", "--out", str(out), "--device", "cpu", "-q"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"] if count > 1 else []
    command = [sys.executable, "-m", *torchrun, "decomposable_lab", *arguments, "--set", f"method={method}", "epochs=1"]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "record.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["us-net", "trp"])
def test_so_it_is_with_four_processes(method, tmp_path):
    one, four = (train(tmp_path / str(count), method, count) for count in (1, 4))
    for a, b in zip(one["epochs"], four["epochs"], strict=True):
        for key in a.keys() - {"seconds"}:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), key
