"""Print what became of every claim, as a table: python results/claims.py results/paper-laptop/exhibits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from decomposable.commands.exhibits import MARKS
from decomposable.comparison.exhibits.catalogue import EXHIBITS


def main() -> None:
    print("| exhibit | claim | on | verdict | measured |\n| --- | --- | --- | --- | --- |")
    for name in EXHIBITS:
        path = Path(sys.argv[1]) / f"{name}.json"
        if not path.is_file():
            print(f"| {name} | | | not measured yet | |")
            continue
        for claim in json.loads(path.read_text())["claims"]:
            cells = (name, claim["text"], claim.get("on", ""), MARKS[claim["verdict"]], claim["seen"])
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


if __name__ == "__main__":
    main()
