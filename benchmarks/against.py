"""This checkout against another one, as before a change to the structure: resize, joint step, file and bundle.

    python benchmarks/against.py ../other-checkout

Both are measured in processes of their own that take turns, so that a slow moment of the machine slows both alike. A
figure is the median of a process; of those there are five for each checkout, and their medians are compared with their
spread. Only names of the public API are used, so that the other checkout may be of another structure.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
SIZES = (0.75, 0.5, 0.25, 0.1)
STEPS = 12


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """The median time of a call after one that does not count."""
    run()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken)


def measure() -> dict[str, float]:
    """All figures of the checkout that is imported here, in milliseconds."""
    import torch

    import decomposable as dn

    try:  # an earlier checkout, beside which a later one may be installed
        from decomposable.edge import AnySizeSession
    except ImportError:
        from decomposable_edge import AnySizeSession

    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    figures = {}
    net = dn.decompose(dn.models.resnet50().eval(), example_input=torch.zeros(1, 3, 64, 64))
    turns = itertools.cycle(SIZES)
    figures["resize_, ResNet-50"] = median_ms(lambda: net.resize_(macs=next(turns)), 40)
    small = dn.decompose(dn.models.resnet20().eval(), example_input=torch.zeros(1, 3, 32, 32))
    images = [torch.randn(64, 3, 32, 32) for _ in range(2)]
    small.calibrate_(images, sizes=[0.2, 0.3, 0.5, 0.8])
    with tempfile.TemporaryDirectory() as folder:
        is_earlier = importlib.util.find_spec("decomposable.edge") is not None
        file = Path(folder) / "net.safetensors"
        bundle = Path(folder) / ("any.onnx" if is_earlier else "any.safetensors")
        small.save(file)
        figures["load at 0.3x, ResNet-20"] = median_ms(lambda: dn.load(file, macs=0.3), 10)
        if hasattr(dn, "export_any_size"):  # of an earlier checkout
            dn.export_any_size(small, bundle)
        else:
            small.save(bundle, onnx=True)
        figures["open a bundle, ResNet-20"] = median_ms(lambda: AnySizeSession(bundle, macs=0.3, threads=1), 8)
        session = AnySizeSession(bundle, threads=1, keep=1)
        figures["resize a bundle, ResNet-20"] = median_ms(lambda: session.resize(macs=next(turns)), 20)
        x = images[0][:1].numpy()
        figures["run a bundle, ResNet-20"] = median_ms(lambda: session.run(x), 200)
    model = dn.models.resnet20().train()
    joint = dn.JointObjective(model, ratio=(0.2, 0.2), seed=0)
    labels = torch.randint(0, 10, (64,))

    def step() -> None:
        model.zero_grad()
        joint.backward(lambda net: torch.nn.functional.cross_entropy(net(images[0]), labels))

    figures["joint step, ResNet-20"] = median_ms(step, STEPS)
    return figures


def measured_in(checkout: Path) -> dict[str, float]:
    """The figures of a checkout, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--measure"], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="the other checkout; none: nothing to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure()))
        return
    if args.other is None:
        print("no other checkout was named: nothing to compare with")
        return
    from _common import record, verdict  # not above: it takes modules of this checkout

    found: dict[str, list[dict[str, float]]] = {"other": [], "this": []}
    for number in range(args.rounds):
        order = ["other", "this"] if number % 2 == 0 else ["this", "other"]
        for which in order:
            found[which].append(measured_in(args.other.resolve() if which == "other" else HERE))
    git = ["git", "-C", str(args.other), "rev-parse", "--short", "HEAD"]
    figures: dict[str, object] = {"other_commit": subprocess.run(git, capture_output=True, text=True).stdout.strip()}
    for name in found["this"][0]:
        before, after = ([run[name] for run in found[which]] for which in ("other", "this"))
        ratio = statistics.median(after) / statistics.median(before)
        spread = max(max(x) - min(x) for x in (before, after)) / statistics.median(before)
        figures[name] = {"other_ms": before, "this_ms": after, "ratio": ratio, "spread": spread}
        verdict(f"{name}: this / other", ratio, f"at most 1 + the spread of {spread:.2f}", ratio <= 1 + spread)
    record("against", figures)


if __name__ == "__main__":
    main()
