"""What is committed of the paper's exhibits: complete, and with a reason for what does not hold."""

import json
from pathlib import Path

import pytest

from decomposable_lab.exhibits.catalogue import EXHIBITS

FOLDER = Path(__file__).resolve().parents[2] / "results" / "paper-laptop"


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_exhibit_is_there_and_says_why_a_claim_does_not_hold(name):
    exhibit = json.loads((FOLDER / "exhibits" / f"{name}.json").read_text())
    remarks = json.loads((FOLDER / "remarks.json").read_text())
    assert exhibit["claims"]
    assert exhibit["figures"] or exhibit["tables"]
    assert all(exhibit[key] for key in ("commit", "command", "machine"))
    assert all(run["command"] and run["commit"] for group in exhibit["trainings"] for run in group["runs"])
    if any(claim["verdict"] != "holds" for claim in exhibit["claims"]):
        assert all(len(remark) > 50 for remark in remarks[name])
        assert remarks[name]
