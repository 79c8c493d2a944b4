"""Print what became of every claim, as a table: python results/claims.py results/paper-laptop/exhibits.

First how many there are by verdict: of the paper, and of this project's own goals. Networks are said in a word.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from decomposable_lab.exhibits.catalogue import EXHIBITS
from decomposable_lab.report.verdicts import VERDICTS


def counted(found: list[tuple[bool, str]]) -> str:
    """Such as "of 53 claims of the paper 24 hold …"."""
    lines = []
    for is_ours, whose in ((False, "claims of the paper"), (True, "goals of this project")):
        verdicts = [verdict for ours, verdict in found if ours == is_ours]
        counts = ", ".join(f"{verdicts.count(key)} {said}" for key, said in VERDICTS.items() if key in verdicts)
        lines.append(f"{len(verdicts)} {whose}: {counts}")
    return "\n".join(lines)


def network(title: str) -> str:
    """Of "a small CNN on Fashion-MNIST, 8 epochs" what tells it from the other."""
    return title.partition(" on ")[0].removeprefix("a small ")


def main() -> None:
    files = [Path(sys.argv[1]) / f"{name}.json" for name in EXHIBITS]
    contents = [json.loads(path.read_text()) for path in files if path.is_file()]
    claims = [(bool(each.get("is_ours")), claim["verdict"]) for each in contents for claim in each["claims"]]
    print(counted(claims) + "\n")
    print("| exhibit | claim | on | verdict | measured |\n| --- | --- | --- | --- | --- |")
    for name in EXHIBITS:
        path = Path(sys.argv[1]) / f"{name}.json"
        if not path.is_file():
            print(f"| {name} | | | not measured yet | |")
            continue
        for claim in json.loads(path.read_text())["claims"]:
            cells = (name, claim["text"], network(claim.get("on", "")), VERDICTS[claim["verdict"]], claim["seen"])
            print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")


if __name__ == "__main__":
    main()
