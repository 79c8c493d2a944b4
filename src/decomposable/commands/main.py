"""The command line: one verb per intent, each a module in `commands`. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from decomposable import __version__
from decomposable.commands import bench, calibrate, compare, demo, evaluate, export, resize, sizes, train
from decomposable.console import OneLineParser, Verb, add_showing, run_command

VERBS: tuple[Verb, ...] = (
    demo.VERB,
    train.VERB,
    calibrate.VERB,
    sizes.VERB,
    evaluate.VERB,
    resize.VERB,
    export.VERB,
    bench.VERB,
    compare.VERB,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code comes back: 0 it worked, 1 it failed, 2 it was called wrong, 130 interrupted."""
    return run_command("decomposable", build_parser, argv)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = OneLineParser(
        prog="decomposable",
        description="Train a neural network once, then run it at any size.",
        epilog="example:\n  decomposable demo\n\nexit codes: 0 it worked, 1 it failed, 2 it was called wrong, "
        "130 it was interrupted",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"decomposable {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb_name", required=True)
    for verb in VERBS:
        one = verbs.add_parser(
            verb.name,
            help=verb.summary,
            description=verb.description,
            epilog=f"example:\n  {verb.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        verb.add_options(one)
        add_showing(one)
        one.add_argument("--json", action="store_true", help="print the result as JSON, for machines")
        one.set_defaults(verb=verb, run=verb.run, if_interrupted=verb.if_interrupted)
    return parser
