"""`decomposable resize`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import arguments, networks
from decomposable_edge.checks import only_one
from decomposable_edge.console import Verb, answer

if TYPE_CHECKING:
    from decomposable_edge.sizing.plans import RankPlan

KINDS = ("state-dict", "artifact")


def _options(parser: argparse.ArgumentParser) -> None:
    arguments.add(parser, "file", "--macs", "--params", "--ratio")
    arguments.add(parser, "--align", help=arguments.ALIGN + arguments.MEASURED)
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, required=True, help="the file to write (.safetensors)")
    kinds = "state-dict: this size, as plain layers; artifact: this size and all smaller ones (default: state-dict)"
    parser.add_argument("--as", dest="kind", metavar="KIND", choices=KINDS, default=KINDS[0], help=kinds)
    arguments.add(parser, "--force")


def _run(options: argparse.Namespace) -> None:
    from decomposable.network import artifact

    asked, size = _size(options)
    out = arguments.checked_out(options, [".safetensors"])
    contents = artifact.read(options.file, **size)  # no more of the file than this size
    plan = contents.plan
    networks.warn_of("resize", contents.calibration_warning(plan))
    info = {**contents.info, "resized": asked, "sizes": _up_to(contents.info.get("sizes"), plan)}
    if options.kind == "artifact":
        contents.save(out, info)
    else:
        artifact.save_size(contents, plan, out, info)
    written = out.stat().st_size
    content = {
        "file": str(out),
        "kind": options.kind,
        "macs": plan.macs,
        "params": plan.params,
        "instead_of": plan.instead_of,
        "ranks": dict(plan.ranks),
        "bytes": written,
    }
    note = contents.skeleton.built_by
    model = "" if note is not None and not note["is_changed"] else ", model=..."
    how = f"\n{out}: {written:,} bytes; load it with decomposable.load({str(out)!r}{model})"
    answer(options, content, str(plan), how)


def _size(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the one size that was asked for, as it was typed and as `artifact.read` takes it."""
    size: dict[str, Any] = arguments.sizes_asked(options)
    came = " and ".join(f"--{name}" for name in size) or "none"
    name, _ = only_one(size, f"a size is given by exactly one of --macs, --params and --ratio; got {came}")
    asked = f"{name}={getattr(options, name)}"
    if options.align is None:
        return asked, size
    return f"{asked}, align={options.align}", {**size, "align": options.align}


def _up_to(rows: object, plan: RankPlan) -> list[Any]:
    """Return the measured sizes that are still there."""
    known = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [row for row in known if isinstance(row.get("params"), int) and row["params"] <= plan.params]


VERB = Verb(
    name="resize",
    summary="write one size of a network as a file of its own",
    description=(
        "Write one size of a network file: as the plain state dict of a network of that size, or as a network file\n"
        "whose largest size it is. decomposable.load(OUT, model=...) reads both, ready to be run or trained further."
    ),
    example="decomposable resize runs/digits/network.safetensors --macs 0.25 -o small.safetensors",
    add_options=_options,
    run=_run,
)
