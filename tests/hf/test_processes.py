"""Two processes by gloo make the training of one that has the whole batch, and one that goes on repeats it."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra hf is not installed")
PROGRAM = Path(__file__).with_name("two_processes.py")
sys.path.insert(0, str(PROGRAM.parents[1]))
from several import check_same, weights_of_two  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def test_two_processes_train_as_one(tmp_path):
    spec = importlib.util.spec_from_file_location("two_hf_processes", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    found = weights_of_two(PROGRAM, tmp_path)
    check_same(found, {f"{each}": program.trained(tmp_path / f"alone-{each}", scratch=each) for each in (False, True)})
