"""`decomposable bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import arguments, networks
from decomposable.progress import ProgressLine, progress_line
from decomposable_edge.console import Verb, answer, as_table, batch_size, seconds, showing_warnings, threads
from decomposable_edge.errors import InvalidArgumentError

if TYPE_CHECKING:
    from decomposable_edge.sizing.latency import Entry, LatencyProfile

HEADER = ("runtime", "size", "MACs", "parameters", "median ms", "middle half", "speed-up", "repetitions")
_IN_WORDS = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime"}  # in the figure


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add(parser, "file")
    add("--sizes", metavar="LIST", help="besides the original: parts of its MACs, as in 0.5,0.25")
    add("--batch", metavar="N", type=batch_size, default=1, help="samples in one pass (default: 1)")
    add("--threads", metavar="N", type=threads, help="threads (default: as many as PyTorch uses)")
    which = "torch, onnxruntime or both, with a comma (default: those that are installed)"
    add("--runtime", metavar="LIST", help=which)
    add("--seconds", metavar="S", type=seconds, default=10.0, help="how long to measure in each runtime (default: 10)")
    arguments.add(parser, "--align", help=f"{arguments.ALIGN}; measured: try which is best")
    add("--input", metavar="SHAPE", help="one sample, as in 3x32x32, where the file does not know it")
    add("--model", metavar="FUNCTION", help="package.module:function that builds the model")
    arguments.add(parser, "--recipe")
    add("--out", metavar="PROFILE", type=Path, help="where to keep it (default: FILE.latency.json)")


def _run(options: argparse.Namespace) -> None:
    sizes, out = arguments.sizes_listed(options), _place(options)
    with showing_warnings("decomposable bench"), progress_line(options) as line:
        profile = _of_network(options, sizes, line)
        profile.save(out)
    _show(options, profile, out)


def _place(options: argparse.Namespace) -> Path:
    """Return where the profile goes, checked before anything is measured."""
    from decomposable_edge.sizing.latency import LatencyProfile

    out: Path = options.out or LatencyProfile.path_beside(options.file)
    if options.out is None and not options.file.exists():
        return out  # which is said better by who reads it
    try:
        LatencyProfile.check_place(out)
    except InvalidArgumentError as error:
        if options.out is None:
            raise
        raise InvalidArgumentError(f"--out {error}") from error
    return out


def _of_network(options: argparse.Namespace, sizes: list[float] | None, say: ProgressLine) -> LatencyProfile:
    from torch import get_num_threads

    from decomposable.export.measuring import measure
    from decomposable.network.calls import InputSpec
    from decomposable.network.decomposed import DecomposedNet
    from decomposable_edge.sizing.latency import LatencyProfile

    runtimes = _runtimes(options.runtime)
    net = networks.open_network(options)
    if not isinstance(net, DecomposedNet):
        raise InvalidArgumentError(f"{options.file}: it holds no decomposed network; allowed: a file of net.save()")
    spec = None if options.input is None else InputSpec.of(networks.example(options.input, net))
    if spec is None and net.call is None:
        raise InvalidArgumentError(f"--input is needed: {options.file} does not say what the network takes")
    threads = options.threads or get_num_threads()  # in every runtime: else their times could not be compared
    how = arguments.taken(options, "batch", "seconds", "align") | {"threads": threads}
    entries = [measure(net, sizes, runtime=runtime, input=spec, say=say, **how) for runtime in runtimes]
    return LatencyProfile.of(net.selector, entries)


def _runtimes(text: str | None) -> Sequence[str]:
    from decomposable_edge.sizing.latency import RUNTIMES

    if text is None:
        return RUNTIMES if find_spec("onnxruntime") and find_spec("onnxscript") else RUNTIMES[:1]
    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in RUNTIMES:
            raise InvalidArgumentError(f"--runtime {text}: got {name!r}; allowed: {', '.join(RUNTIMES)}")
    return names


def _show(options: argparse.Namespace, profile: LatencyProfile, out: Path) -> None:
    entries = [
        {**asdict(entry), "sizes": [{**asdict(timed), "speed_up": speed} for timed, speed in _speeds(entry)]}
        for entry in profile.entries
    ]
    _, _, setting = str(profile.entries[0]).partition(", ")
    answer(
        options,
        {"file": str(options.file), "profile": str(out), "machine": asdict(profile.machine), "entries": entries},
        as_table(HEADER, [row for entry in profile.entries for row in _rows(entry)]),
        f"\n{profile.machine}; {setting}; the sizes of a runtime ran in turn, so that they compare.",
        *(f"{entry.runtime}: align={entry.align}: {entry.rounding}" for entry in profile.entries),
        f"{out}: written; net.resize_(latency_ms=...) uses it",
        _draw(options, profile, out.with_suffix(".png")),
    )


def _draw(options: argparse.Namespace, profile: LatencyProfile, path: Path) -> str:
    """Draw times over size, beside the profile; return what to say about it."""
    from decomposable.commands.figure import draw_times

    times = {
        _IN_WORDS[entry.runtime]: [(each.size, each.median_ms, each.low_ms, each.high_ms) for each in entry.sizes]
        for entry in profile.entries
    }
    title, message = f"{options.file.name}: time over size", f"{profile.machine}; batch {options.batch}"
    return networks.write_figure(path, lambda: draw_times(times, title=title, message=message), again="")


def _speeds(entry: Entry) -> list[tuple[Any, float]]:
    """Return the sizes, largest first, and how much faster each is than the first one, the original."""
    dense = entry.sizes[-1].median_ms
    return [(timed, dense / timed.median_ms) for timed in reversed(entry.sizes)]


def _rows(entry: Entry) -> list[tuple[str, ...]]:
    return [
        (
            entry.runtime,
            f"{timed.size:.3f}",
            "" if timed.macs is None else f"{timed.macs:,}",
            f"{timed.params:,}",
            f"{timed.median_ms:.3f}",
            f"{timed.low_ms:.3f}-{timed.high_ms:.3f}",
            f"{speed:.2f}x",
            str(timed.repetitions),
        )
        for timed, speed in _speeds(entry)
    ]


VERB = Verb(
    name="bench",
    summary="how long each size of a network takes on this machine",
    description=(
        "Time a network and several of its sizes on this machine's processor, in PyTorch and in ONNX Runtime: medians\n"
        "of interleaved passes, with the spread. The times are kept beside FILE, so that resize_(latency_ms=5) takes\n"
        "the largest size that holds 5 ms here."
    ),
    example=(
        "decomposable bench runs/digits/network.safetensors\n"
        "  decomposable bench runs/digits/network.safetensors --sizes 0.5,0.25 --batch 32 --runtime torch --align 8"
    ),
    add_options=_options,
    run=_run,
)
