"""`decomposable-lab report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decomposable.commands import arguments
from decomposable.progress import Progress, progress_line
from decomposable_edge.console import Verb, answer

if TYPE_CHECKING:
    from decomposable_lab.report.finding import Found


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="results with exhibits in them, or a run of train")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="the page: a .html file")
    parser.add_argument("--title", metavar="TEXT", help="of the page")
    arguments.add(parser, "--force")


def _run(options: argparse.Namespace) -> None:
    from decomposable_edge.files import write_atomically
    from decomposable_lab.report.finding import find
    from decomposable_lab.report.page import page, plotting_library

    out = arguments.checked_out(options, [".html"])
    with progress_line(options) as line:
        line(Progress("", "reading the records"))
        plotting_library()  # what is not installed is said before anything is read
        found = find(options.folder)
        for run in found.runs:
            _add_explorer(run)
        title = options.title or ("One training" if found.runs else "Decomposable-Net, measured again")
        text = page(found, title)
        write_atomically(out, text.encode())
    content = {"file": str(out), **_counts(found)}
    shown = ", ".join(f"{count} {name}" for name, count in _counts(found).items() if count)
    left = f"left out, because they are no exhibits: {', '.join(found.left_out)}" if found.left_out else None
    answer(options, content, f"{out}: {shown}; {len(text) / 1e6:.1f} MB, all in one file", left)


def _counts(found: Found) -> dict[str, int]:
    claims = sum(len(exhibit["claims"]) for exhibit in found.exhibits)
    return {"exhibits": len(found.exhibits), "claims": claims, "runs": len(found.runs)}


def _add_explorer(run: dict[str, Any]) -> None:
    """The sizes of the network beside a record, where it is there and can be cut to any."""
    from decomposable.network import artifact
    from decomposable_edge.errors import ArtifactError
    from decomposable_lab.comparison.explorer import explored

    path = run["folder"] / "network.safetensors"
    if not path.is_file():
        return
    try:
        selector = artifact.read(path).selector
    except ArtifactError:  # a network of other sizes, such as widths
        return
    measured = [row for row in run["sizes"] if isinstance(row, dict)]
    run["explorer"] = explored(selector, measured, f"{run.get('recipe', '')}, {run['settings'].get('method', '')}")


VERB = Verb(
    name="report",
    summary="make one page of what was measured: exhibits of the paper, or a single run",
    description=(
        "Write one self-contained HTML page. Of a folder with exhibits (decomposable-lab exhibits) it shows\n"
        "every figure and table, the paper's beside ours, and which of its claims hold; of the folder of a run its\n"
        "learning curves, sizes and ranks. A slider chooses a size, and accuracy, MACs, parameters and ranks follow.\n"
        "Nothing is loaded from a network; it takes a browser, and the extra report to make."
    ),
    example="decomposable-lab report results -o report.html\n  decomposable-lab report runs/cifar -o cifar.html",
    add_options=_options,
    run=_run,
)
