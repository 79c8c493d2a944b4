"""Print what became of every claim, as a table: python results/claims.py results/paper-laptop/exhibits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from decomposable.commands.exhibits import MARKS
from decomposable.comparison.exhibits.catalogue import EXHIBITS


def main() -> None:
    print("| exhibit | claim | verdict | measured |\n| --- | --- | --- | --- |")
    for name in EXHIBITS:
        path = Path(sys.argv[1]) / f"{name}.json"
        if not path.is_file():
            print(f"| {name} | | not measured yet | |")
            continue
        for claim in json.loads(path.read_text())["claims"]:
            seen = claim["seen"].replace("|", "\\|")
            print(f"| {name} | {claim['text'].replace('|', chr(92) + '|')} | {MARKS[claim['verdict']]} | {seen} |")


if __name__ == "__main__":
    main()
