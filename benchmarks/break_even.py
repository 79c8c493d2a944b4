"""Where two factors are faster than a dense W̃ in a training pass: measured, and by the rule of `cost.py`.

The rule decides by shapes alone, so that a run repeats exactly; its constants were fitted to the figures printed here.
"""

from __future__ import annotations

import torch
from _common import interleave, ratio_of_medians, record
from torch.nn import functional as F

from decomposable.core.forms import FORMS
from decomposable_edge.sizing.cost import CHAIN_LOSS, TRAFFIC, chain_is_faster

BATCH = 128
LAYOUT = torch.channels_last  # that of the low-rank pass on a CPU


def main() -> None:
    rows = []
    print(" channels  map  rank  MACs ratio  time ratio  rule says")
    for channels, size in ((64, 32), (128, 16), (256, 8), (512, 4)):
        x = torch.randn(BATCH, channels, size, size).to(memory_format=LAYOUT).requires_grad_()
        w = torch.randn(channels, channels, 3, 3).to(memory_format=LAYOUT).requires_grad_()
        g = torch.randn(BATCH, channels, size, size).to(memory_format=LAYOUT)
        for part in (0.05, 0.15, 0.25, 0.35, 0.45):
            rank = max(1, round(3 * channels * part))
            p = torch.randn(rank, channels, 1, 3).to(memory_format=LAYOUT).requires_grad_()
            q = torch.randn(channels, rank, 3, 1).to(memory_format=LAYOUT).requires_grad_()

            def dense() -> None:
                torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), g)

            def two_factors() -> None:
                y = F.conv2d(F.conv2d(x, p, padding=(0, 1)), q, padding=(1, 0))
                torch.autograd.grad(y, (x, p, q), g)

            seconds = interleave({"dense": dense, "two": two_factors}, repeats=7)
            ratio = ratio_of_medians(seconds["two"], seconds["dense"])
            positions = size * size
            chain, maps = FORMS["spatial"].chain(w.shape), (positions, positions)
            says = chain_is_faster(chain, (rank,), inputs=positions, maps=maps, samples=BATCH)
            macs = 6 * rank / (9 * channels)
            print(f"{channels:9d} {size:4d} {rank:5d} {macs:11.2f} {ratio:11.2f}  {'two factors' if says else 'dense'}")
            rows.append({"channels": channels, "size": size, "rank": rank, "macs": macs, "time": ratio, "two": says})
    right = sum((row["time"] < 1) == row["two"] for row in rows)
    lost = sum(max(0.0, (row["time"] if row["two"] else 1.0) - min(row["time"], 1.0)) for row in rows) / len(rows)
    print(f"the rule is right in {right} of {len(rows)} cases and loses {lost:.3f} of a dense pass on average")
    constants = {"traffic": TRAFFIC, "two_layer_loss": CHAIN_LOSS}
    record("break_even", {"rows": rows, "right": right, "lost": lost, **constants})


if __name__ == "__main__":
    main()
