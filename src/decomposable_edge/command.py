"""The command line of a device without PyTorch: ``python -m decomposable_edge``, or ``decomposable-edge``."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from decomposable_edge import __version__
from decomposable_edge.console import (
    OneLineParser,
    alignment,
    as_table,
    batch_size,
    parse_size,
    parse_sizes,
    run_command,
    seconds,
    showing_warnings,
    threads,
)
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.file.container import Array
from decomposable_edge.files import replacing
from decomposable_edge.network import open_network
from decomposable_edge.notes import measured_sizes
from decomposable_edge.npy import read_arrays
from decomposable_edge.session import AnySizeSession, usual_plans
from decomposable_edge.sizing.chain import flat_ranks
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.latency import Entry, LatencyProfile
from decomposable_edge.sizing.plans import RankPlan
from decomposable_edge.sizing.rounding import described
from decomposable_edge.text import printable

PROGRAM = "decomposable-edge"
_LEAST = 1e-9  # of the bases: the size that takes least time to open


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code comes back: 0 it worked, 1 it failed, 2 it was called wrong, 130 interrupted."""
    return run_command(PROGRAM, _parser, argv)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog=PROGRAM, description="Run a network file at any size, without PyTorch.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb_name", required=True)

    def verb(name: str, summary: str, run: Any) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        one.add_argument(
            "file", metavar="FILE", type=Path, help="a network file (.safetensors) that holds its ONNX graph"
        )
        one.set_defaults(run=run, if_interrupted="")
        return one

    sizes = verb("sizes", "list sizes: what they cost, and what was measured of them", _sizes)
    bench = verb("bench", "measure sizes on this device, and keep the times beside the file", _bench)
    run = verb("run", "run it on an array in a file", _run)
    for one in (bench, run):
        one.add_argument(
            "--threads", metavar="N", type=threads, help="threads for one request (default: one for each core)"
        )
    for one, best in ((bench, "try which is best"), (run, "what bench found to be best")):
        one.add_argument(
            "--align",
            metavar="N",
            type=alignment,
            help="round ranks to multiples of N; 1: not at all; auto: to 16, 8 or 4 where that moves a rank little; "
            f"measured: {best} (default: auto)",
        )
    for one in (sizes, bench):
        one.add_argument("--json", action="store_true", help="print the result as JSON, for machines")
    bench.add_argument("--sizes", metavar="LIST", help="besides the full one: parts of the MACs, as in 0.5,0.25")
    bench.add_argument("--batch", metavar="N", type=batch_size, default=1, help="samples in one request (default: 1)")
    bench.add_argument("--seconds", metavar="S", type=seconds, default=10.0, help="how long to measure (default: 10)")
    run.add_argument("input", metavar="INPUT", type=Path, help="an array of numpy (.npy), or several by name (.npz)")
    run.add_argument("-o", "--out", metavar="OUT", type=Path, required=True, help="where it goes (.npy or .npz)")
    for name in ("macs", "params", "ratio"):
        run.add_argument(f"--{name}", metavar="SIZE", help=f"run at this size: a part of the {name}, 25%% or a count")
    run.add_argument("--latency-ms", metavar="T", type=float, help="run at the largest size that takes T here")
    return parser


def _sizes(options: argparse.Namespace) -> None:
    network = open_network(options.file)
    known = {size: a for size, a in measured_sizes(network.info).items() if size >= network.selector.smallest_size}
    accuracies = {network.selector.of_size(size): accuracy for size, accuracy in known.items()}
    plans = dict.fromkeys([*usual_plans(network.selector), *accuracies])
    rows = [_described(plan) | {"accuracy": accuracies.get(plan)} for plan in sorted(plans, key=position, reverse=True)]
    if options.json:
        _say(json.dumps({"file": str(options.file), "sizes": rows}))
        return
    _say(as_table(("MACs", "of all", "parameters", "of all", "ranks", "accuracy"), [_cells(row) for row in rows]))
    takes = ", ".join(
        f"{printable(p.name)} ({printable(' × '.join(map(str, p.shape)))}, {p.dtype})" for p in network.inputs
    )
    profile = LatencyProfile.load_beside(options.file)
    timed = "; ".join(map(str, profile.entries)) if profile is not None else f"none ({PROGRAM} bench measures them)"
    _say(f"\nAny size between the first and the last can be taken. Input: {takes}. Latencies: {timed}.")


def _described(plan: RankPlan) -> dict[str, Any]:
    counts = {name: getattr(plan, name) for name in ("macs", "macs_fraction", "params", "params_fraction")}
    return counts | {"ranks": [min(flat_ranks(plan.ranks)), max(flat_ranks(plan.ranks))]}


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        "" if row["macs"] is None else f"{row['macs']:,}",
        "" if row["macs_fraction"] is None else f"{row['macs_fraction']:.3f}",
        f"{row['params']:,}",
        f"{row['params_fraction']:.3f}",
        "{}-{}".format(*row["ranks"]),
        "" if row["accuracy"] is None else f"{row['accuracy']:.2f}%",
    ]


def _bench(options: argparse.Namespace) -> None:
    sizes = None if options.sizes is None else [size for _, size in parse_sizes("--sizes", options.sizes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of statistics: no output is looked at
        session = AnySizeSession(options.file, ratio=_LEAST, threads=options.threads)
    where = LatencyProfile.path_beside(options.file)
    LatencyProfile.check_place(where)
    with showing_warnings(f"{PROGRAM} bench"):
        profile = session.measure(sizes, batch=options.batch, seconds=options.seconds, align=options.align)
    entry = profile.entries[0]
    if options.json:
        _say(json.dumps({"file": str(options.file), "profile": str(where), **asdict(entry)}))
        return
    _say(_timed_table(entry))
    _say(f"\nalign={entry.align}: {entry.rounding}")
    _say(f"{entry}; {profile.machine}; kept in {where}. In Python: session.resize(latency_ms=…)")


def _timed_table(entry: Entry) -> str:
    slowest = entry.sizes[-1].median_ms
    rows = [
        [
            f"{timed.size:.3f}",
            f"{timed.median_ms:.2f}",
            f"{timed.low_ms:.2f}-{timed.high_ms:.2f}",
            f"{slowest / timed.median_ms:.2f}x",
            str(timed.repetitions),
        ]
        for timed in reversed(entry.sizes)
    ]
    return as_table(("size", "median ms", "middle half", "speed-up", "repetitions"), rows)


def _run(options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in ("macs", "params", "ratio")}
    size: dict[str, Any] = {k: parse_size(f"--{k}", text) for k, text in given.items() if text is not None}
    for name in ("latency_ms", "align"):
        if getattr(options, name) is not None:
            size[name] = getattr(options, name)
    x = read_arrays(options.input)
    if options.out.suffix not in (".npy", ".npz"):
        raise InvalidArgumentError(f"-o {options.out}: got the ending {options.out.suffix!r}; allowed: .npy or .npz")
    with showing_warnings(f"{PROGRAM} run"):
        session = AnySizeSession(options.file, **size, threads=options.threads)
    if options.out.suffix == ".npy" and len(session.outputs) > 1:
        raise InvalidArgumentError(
            f"-o {options.out}: the network has {len(session.outputs)} outputs; allowed: .npz, which holds several"
        )
    found = session.run(x)
    outputs = dict(zip((p.name for p in session.outputs), found if isinstance(found, list) else [found], strict=True))
    with replacing(options.out) as unfinished, unfinished.open("wb") as file:
        if options.out.suffix == ".npz":
            _save_all(file, outputs)
        else:
            np.save(file, found, allow_pickle=False)
    made = "; ".join(f"{' × '.join(map(str, y.shape))}, {y.dtype}" for y in outputs.values())
    _say(f"{options.out}: {made}, at {session!r}, {described(session.plan().align)}")


def _save_all(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    """As numpy.savez, which takes no array called "file"."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.save(entry, array, allow_pickle=False)
