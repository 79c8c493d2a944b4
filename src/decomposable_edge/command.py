"""The command line of a device without PyTorch: ``python -m decomposable_edge``, or ``decomposable-edge``."""

from __future__ import annotations

import argparse
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from decomposable_edge import __version__, console
from decomposable_edge.console import answer, as_table, parse_size, parse_sizes, run_command, showing_warnings
from decomposable_edge.errors import InvalidArgumentError
from decomposable_edge.file.container import Array
from decomposable_edge.files import replacing
from decomposable_edge.network import open_network
from decomposable_edge.notes import measured_sizes
from decomposable_edge.session import AnySizeSession, usual_plans
from decomposable_edge.sizing.chain import flat_ranks
from decomposable_edge.sizing.interpolation import position
from decomposable_edge.sizing.latency import LatencyProfile
from decomposable_edge.sizing.rounding import described
from decomposable_edge.text import first_line, printable

PROGRAM = "decomposable-edge"
_LEAST = 1e-9  # of the bases: the size that takes least time to open


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code comes back: 0 it worked, 1 it failed, 2 it was called wrong, 130 interrupted."""
    return run_command(PROGRAM, _parser, argv)


def _parser() -> argparse.ArgumentParser:
    parser = console.OneLineParser(prog=PROGRAM, description="Run a network file at any size, without PyTorch.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb_name", required=True)

    def verb(name: str, summary: str, run: Any) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        file = "a network file (.safetensors) that holds its ONNX graph"
        one.add_argument("file", metavar="FILE", type=Path, help=file)
        one.set_defaults(run=run, if_interrupted="", json=False)
        return one

    sizes = verb("sizes", "list sizes: what they cost, and what was measured of them", _sizes)
    bench = verb("bench", "measure sizes on this device, and keep the times beside the file", _bench)
    run = verb("run", "run it on an array in a file", _run)
    for one, best in ((bench, "try which is best"), (run, "what bench found to be best")):
        add = one.add_argument
        add("--threads", metavar="N", type=console.threads, help="threads for one request (default: one for each core)")
        align = "round ranks to multiples of N; 1: not at all; auto: to 16, 8 or 4 where that moves a rank little; "
        add("--align", metavar="N", type=console.alignment, help=f"{align}measured: {best} (default: auto)")
    for one in (sizes, bench):
        one.add_argument("--json", action="store_true", help="print the result as JSON, for machines")
    add = bench.add_argument
    add("--sizes", metavar="LIST", help="besides the full one: parts of the MACs, as in 0.5,0.25")
    add("--batch", metavar="N", type=console.batch_size, default=1, help="samples in one request (default: 1)")
    add("--seconds", metavar="S", type=console.seconds, default=10.0, help="how long to measure (default: 10)")
    add = run.add_argument
    add("input", metavar="INPUT", type=Path, help="an array of numpy (.npy), or several by name (.npz)")
    add("-o", "--out", metavar="OUT", type=Path, required=True, help="where it goes (.npy or .npz)")
    for name in ("macs", "params", "ratio"):
        add(f"--{name}", metavar="SIZE", help=f"run at this size: a part of the {name}, 25%% or a count")
    add("--latency-ms", metavar="T", type=float, help="run at the largest size that takes T here")
    return parser


def _sizes(options: argparse.Namespace) -> None:
    network = open_network(options.file)
    selector = network.selector
    known = {size: a for size, a in measured_sizes(network.info).items() if size >= selector.smallest_size}
    accuracies = {selector.of_size(size): accuracy for size, accuracy in known.items()}
    rows = []
    for plan in sorted(dict.fromkeys((*usual_plans(selector), *accuracies)), key=position, reverse=True):
        counts = {name: getattr(plan, name) for name in ("macs", "macs_fraction", "params", "params_fraction")}
        ranks = [min(flat_ranks(plan.ranks)), max(flat_ranks(plan.ranks))]
        rows.append({**counts, "ranks": ranks, "accuracy": accuracies.get(plan)})
    header = ("MACs", "of all", "parameters", "of all", "ranks", "accuracy")
    shown = ("{macs:,}", "{macs_fraction:.3f}", "{params:,}", "{params_fraction:.3f}", "{ranks[0]}-{ranks[1]}")
    ports = [(printable(port.name), printable(" × ".join(map(str, port.shape))), port) for port in network.inputs]
    takes = ", ".join(f"{name} ({shape}, {port.dtype})" for name, shape, port in ports)
    profile = None if options.json else LatencyProfile.load_beside(options.file)
    timed = "; ".join(map(str, profile.entries)) if profile is not None else f"none ({PROGRAM} bench measures them)"
    answer(
        options,
        {"file": str(options.file), "sizes": rows},
        _table(header, (*shown, "{accuracy:.2f}%"), rows),
        f"\nAny size between the first and the last can be taken. Input: {takes}. Latencies: {timed}.",
    )


def _table(header: Sequence[str], shown: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table, of each what these formats show; what is not known stays empty."""

    def cell(text: str, row: Mapping[str, Any]) -> str:
        try:
            return text.format(**row)
        except TypeError:  # None has no format
            return ""

    return as_table(header, [[cell(text, row) for text in shown] for row in rows])


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
    slowest = entry.sizes[-1].median_ms
    header = ("size", "median ms", "middle half", "speed-up", "repetitions")
    shown = ("{size:.3f}", "{median_ms:.2f}", "{low_ms:.2f}-{high_ms:.2f}", "{speed_up:.2f}x", "{repetitions}")
    rows = [{**asdict(each), "size": each.size, "speed_up": slowest / each.median_ms} for each in entry.sizes[::-1]]
    answer(
        options,
        {"file": str(options.file), "profile": str(where), **asdict(entry)},
        _table(header, shown, rows),
        f"\nalign={entry.align}: {entry.rounding}",
        f"{entry}; {profile.machine}; kept in {where}. In Python: session.resize(latency_ms=…)",
    )


def _run(options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in ("macs", "params", "ratio")}
    size: dict[str, Any] = {k: parse_size(f"--{k}", text) for k, text in given.items() if text is not None}
    size |= {"latency_ms": options.latency_ms, "align": options.align}
    x, out = read_arrays(options.input), options.out
    if out.suffix not in (".npy", ".npz"):
        raise InvalidArgumentError(f"-o {out}: got the ending {out.suffix!r}; allowed: .npy or .npz")
    with showing_warnings(f"{PROGRAM} run"):
        session = AnySizeSession(options.file, **size, threads=options.threads)
    names = [port.name for port in session.outputs]
    if out.suffix == ".npy" and len(names) > 1:
        raise InvalidArgumentError(
            f"-o {out}: the network has {len(names)} outputs; allowed: .npz, which holds several"
        )
    found = session.run(x)
    outputs = dict(zip(names, found if isinstance(found, list) else [found], strict=True))
    with replacing(out) as unfinished:
        if out.suffix == ".npy":
            np.save(unfinished, found, allow_pickle=False)
        else:  # as numpy.savez, which takes no array called "file"
            with zipfile.ZipFile(unfinished, "w") as archive:
                for name, array in outputs.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.save(entry, array, allow_pickle=False)
    made = "; ".join(f"{' × '.join(map(str, y.shape))}, {y.dtype}" for y in outputs.values())
    answer(options, None, f"{out}: {made}, at {session!r}, {described(session.plan().align)}")


def read_arrays(path: Path) -> Array | dict[str, Array]:
    """Return the array of a file of ``numpy.save``, or those of ``numpy.savez`` by name. No code is run."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("not an ordinary file")
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return _checked(loaded)
        with loaded:
            return {name: _checked(array) for name, array in loaded.items()}
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as a piece of Python, which fails in many ways
        raise InvalidArgumentError(
            f"{path}: not an array ({first_line(error, 120)}); allowed: a file of numpy.save with an array of numbers, "
            "or of numpy.savez with several by name"
        ) from error


def _checked(value: object) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":  # of an archive, anything may come
        raise ValueError(f"it holds {getattr(value, 'dtype', 'bytes')!s:.40}")
    return value
