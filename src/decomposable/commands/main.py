"""The command line: one verb per intent, each a module in `commands`. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from decomposable import __version__
from decomposable.commands import bench, calibrate, cut, demo, evaluate, export, resize, sizes, train
from decomposable_edge.console import (
    CALLED_WRONG,
    OneLineParser,
    SaidElsewhere,
    Verb,
    is_first_process,
    run_command,
)
from decomposable_edge.errors import LABORATORY, InvalidArgumentError

VERBS: tuple[Verb, ...] = tuple(
    module.VERB for module in (demo, cut, train, calibrate, sizes, evaluate, resize, export, bench)
)
IN_THE_LABORATORY = ("compare", "exhibits", "report")
"""Verbs of decomposable-lab: who types one here is told so."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code comes back: 0 it worked, 1 it failed, 2 it was called wrong, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in IN_THE_LABORATORY:
        where = f"the verb {arguments[0]} is one of the laboratory, {LABORATORY}"
        print(f"decomposable {arguments[0]}: error: {where}", file=sys.stderr)
        return CALLED_WRONG
    return run_command("decomposable", parser, arguments)


def parser() -> argparse.ArgumentParser:
    """Return the parser of `decomposable`."""
    description = "Train a neural network once, then run it at any size."
    return build_parser("decomposable", description, VERBS, example="decomposable demo")


def build_parser(program: str, description: str, verbs: Sequence[Verb], *, example: str) -> argparse.ArgumentParser:
    """Return the parser of a program with these verbs."""
    as_written: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    codes = "exit codes: 0 it worked, 1 it failed, 2 it was called wrong, 130 it was interrupted"
    parser = OneLineParser(
        prog=program, description=description, epilog=f"example:\n  {example}\n\n{codes}", **as_written
    )
    parser.add_argument("--version", action="version", version=f"{program} {__version__}")
    choices = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb_name", required=True)
    for verb in verbs:
        epilog = f"example:\n  {verb.example}"
        one = choices.add_parser(
            verb.name, help=verb.summary, description=verb.description, epilog=epilog, **as_written
        )
        verb.add_options(one)
        shown = one.add_mutually_exclusive_group()
        shown.add_argument(
            "-q", "--quiet", action="store_true", help="show no progress: only results, warnings, errors"
        )
        shown.add_argument("-v", "--verbose", action="store_true", help="show more of what is going on")
        one.add_argument("--json", action="store_true", help="print the result as JSON, for machines")
        run = verb.run if verb.name == train.VERB.name else partial(_alone, verb)
        one.set_defaults(verb=verb, run=run, if_interrupted=verb.if_interrupted)
    return parser


def _alone(verb: Verb, options: argparse.Namespace) -> None:
    """Run a verb that several processes cannot share."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        if not is_first_process():
            raise SaidElsewhere
        raise InvalidArgumentError(f"torchrun: {verb.name} is the work of one process; allowed with several: train")
    verb.run(options)
