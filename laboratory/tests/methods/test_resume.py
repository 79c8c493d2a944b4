"""Every method is resumed like any run: cut off in the middle, it ends with the bytes of a run that was not."""

import pytest

import decomposable as dn
from decomposable.training import methods

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
QUICK = {
    "device": "cpu",
    "epochs": 2,
    "train_images": 200,
    "calibration_images": 100,
    "calibrated_sizes": (0.5,),
    "sizes": (1.0, 0.5),
    "checkpoint_seconds": 0.0,
}
OWN = {
    "width": {"width": 0.5},
    "scratch": {"ranks": (2, 9, 8, 7, 6, 5)},
    "trp": {"trp_interval": 3, "trp_energy": 0.9},
    "decomposable": {"refresh": 3},
}


class Killed(Exception):
    pass


def killing(line):
    if "epoch 2/2, step 2/4" in line:
        raise Killed


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("plain", "width") else pytest.mark.slow) for name in methods.METHODS],
)
def test_a_run_that_is_cut_off_ends_with_the_same_bytes(name, tmp_path):
    arguments = {**QUICK, "method": name, **OWN.get(name, {})}
    if name == "tucker":
        dn.train("digits", out=tmp_path / "init", method="plain", **{**QUICK, "epochs": 8})
        arguments["init"] = tmp_path / "init" / "network.safetensors"
    whole = dn.train("digits", out=tmp_path / "whole", **arguments)
    with pytest.raises(Killed):
        dn.train("digits", out=tmp_path / "cut", progress=killing, **arguments)
    assert (tmp_path / "cut" / "checkpoint.pt").exists()
    resumed = dn.train("digits", out=tmp_path / "cut", resume=True, **arguments)
    assert resumed["sizes"] == whole["sizes"]
    networks = [(tmp_path / run / "network.safetensors").read_bytes() for run in ("whole", "cut")]
    assert networks[0] == networks[1]
