"""The command line: one verb per intent, each a module in `commands`. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from decomposable import __version__
from decomposable.commands import bench, calibrate, compare, demo, evaluate, export, resize, sizes, train
from decomposable.commands.verb import Verb, add_showing
from decomposable.errors import DecomposableError, InvalidArgumentError
from decomposable.interrupts import Interrupted
from decomposable.text import printable

OK, FAILED, CALLED_WRONG, INTERRUPTED = 0, 1, 2, 130


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
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = build_parser().parse_args(arguments)
    except SystemExit as done:  # --help and --version end here too
        return int(done.code or OK)
    options.command = shlex.join(["decomposable", *arguments])
    try:
        options.verb.run(options)
        sys.stdout.flush()  # what cannot be written is an error now, and not when the interpreter ends
    except InvalidArgumentError as error:
        return _fail(options.verb.name, error, CALLED_WRONG)
    except BrokenPipeError:  # who reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename is not None else error
        return _fail(options.verb.name, named, FAILED)
    except Interrupted as stopped:
        return _end(options.verb.name, stopped)
    except DecomposableError as error:
        return _fail(options.verb.name, error, FAILED)
    except KeyboardInterrupt:
        return _end(options.verb.name, "; ".join(filter(None, ("interrupted", options.verb.if_interrupted))))
    return OK


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
        one.set_defaults(verb=verb)
    return parser


class OneLineParser(argparse.ArgumentParser):
    """Errors in one line: argparse would print the usage first, which hides what is wrong."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and leave with code 2."""
        self.exit(CALLED_WRONG, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _end(verb: str, stopped: object) -> int:
    """It was asked to stop, and did: that is no error."""
    print(f"decomposable {verb}: {' '.join(str(stopped).split())}", file=sys.stderr)
    return INTERRUPTED


def _fail(verb: str, error: object, code: int) -> int:
    line = printable(" ".join(str(error).split()))
    print(f"decomposable {verb}: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
