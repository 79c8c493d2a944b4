"""`decomposable resize`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import networks, opening
from decomposable.console import Verb

if TYPE_CHECKING:
    from decomposable.sizing.plans import RankPlan

KINDS = ("state-dict", "artifact")


def _options(parser: argparse.ArgumentParser) -> None:
    networks.add_file(parser)
    networks.add_size(parser)
    parser.add_argument(
        "--align", metavar="N", type=opening.alignment, help="round ranks to multiples: 8, 16 …; auto or measured"
    )
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, required=True, help="the file to write (.safetensors)")
    parser.add_argument(
        "--as",
        dest="kind",
        metavar="KIND",
        choices=KINDS,
        default=KINDS[0],
        help="state-dict: this size, as plain layers; artifact: this size and all smaller ones (default: state-dict)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT where it exists")


def _run(options: argparse.Namespace) -> None:
    from decomposable.errors import InvalidArgumentError
    from decomposable.network import artifact

    asked, size = networks.size_asked(options)
    if options.align is not None:
        asked, size = f"{asked}, align={options.align}", {**size, "align": options.align}
    if options.out.suffix != ".safetensors":
        raise InvalidArgumentError(f"-o {options.out}: got the ending {options.out.suffix!r}; allowed: .safetensors")
    if not options.out.parent.is_dir():
        raise InvalidArgumentError(
            f"-o {options.out}: there is no folder {options.out.parent}; allowed: one that exists"
        )
    if options.out.exists() and not options.force:
        raise InvalidArgumentError(f"-o {options.out}: it exists; allowed: another name, or --force to replace it")
    contents = artifact.read(options.file, **size)  # no more of the file than this size
    plan = contents.plan
    networks.warn_of("resize", contents.complaint(plan))
    info = {**contents.info, "resized": asked, "sizes": _up_to(contents.info.get("sizes"), plan)}
    if options.kind == "artifact":
        contents.save(options.out, info)
    else:
        artifact.save_size(contents, plan, options.out, info)
    written = options.out.stat().st_size
    if options.json:
        print(
            json.dumps(
                {
                    "file": str(options.out),
                    "kind": options.kind,
                    "macs": plan.macs,
                    "params": plan.params,
                    "instead_of": plan.instead_of,
                    "ranks": dict(plan.ranks),
                    "bytes": written,
                }
            )
        )
        return
    print(plan)
    note = contents.skeleton.built_by
    model = "" if note is not None and not note["is_changed"] else ", model=..."
    print(f"\n{options.out}: {written:,} bytes; load it with decomposable.load({str(options.out)!r}{model})")


def _up_to(rows: object, plan: RankPlan) -> list[Any]:
    """The measured sizes that are still there."""
    return [
        row
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict) and isinstance(row.get("params"), int) and row["params"] <= plan.params
    ]


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
