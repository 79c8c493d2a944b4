"""The command line: one verb per intent, each a module in `commands`. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from decomposable import __version__
from decomposable.commands import bench, calibrate, compare, cut, demo, evaluate, export, report, resize, sizes, train
from decomposable_edge.console import OneLineParser, SaidElsewhere, Verb, is_first_process, run_command
from decomposable_edge.errors import InvalidArgumentError

_IN_ORDER = (demo, cut, train, calibrate, sizes, evaluate, resize, export, bench, compare, report)
VERBS: tuple[Verb, ...] = tuple(module.VERB for module in _IN_ORDER)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code comes back: 0 it worked, 1 it failed, 2 it was called wrong, 130 interrupted."""
    return run_command("decomposable", build_parser, argv)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    as_written: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    codes = "exit codes: 0 it worked, 1 it failed, 2 it was called wrong, 130 it was interrupted"
    parser = OneLineParser(
        prog="decomposable",
        description="Train a neural network once, then run it at any size.",
        epilog=f"example:\n  decomposable demo\n\n{codes}",
        **as_written,
    )
    parser.add_argument("--version", action="version", version=f"decomposable {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb_name", required=True)
    for verb in VERBS:
        epilog = f"example:\n  {verb.example}"
        one = verbs.add_parser(verb.name, help=verb.summary, description=verb.description, epilog=epilog, **as_written)
        verb.add_options(one)
        shown = one.add_mutually_exclusive_group()
        shown.add_argument(
            "-q", "--quiet", action="store_true", help="show no progress: only results, warnings, errors"
        )
        shown.add_argument("-v", "--verbose", action="store_true", help="show more of what is going on")
        one.add_argument("--json", action="store_true", help="print the result as JSON, for machines")
        run = verb.run if verb is train.VERB else partial(_alone, verb)
        one.set_defaults(verb=verb, run=run, if_interrupted=verb.if_interrupted)
    return parser


def _alone(verb: Verb, options: argparse.Namespace) -> None:
    """Run a verb that several processes cannot share."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        if not is_first_process():
            raise SaidElsewhere
        raise InvalidArgumentError(f"torchrun: {verb.name} is the work of one process; allowed with several: train")
    verb.run(options)
