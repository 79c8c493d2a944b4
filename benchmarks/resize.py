"""`resize_` on ResNet-50: the time from one size to another, the extra memory, and inference against `extract`."""

from __future__ import annotations

import itertools
import statistics
import time
import warnings

import torch
from _common import interleave, ratio_of_medians, record, verdict

import decomposable as dn
from decomposable.network.decomposed import DecomposedNet

SIZES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1)


def own_bytes(net: DecomposedNet) -> int:
    """Bytes of the size in force that are not shared with the original or the factors."""
    shared = {p.untyped_storage().data_ptr() for p in net._base.parameters()}
    shared |= {t.untyped_storage().data_ptr() for f in net._factors.values() for t in f}
    own = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in net.module.state_dict().values()}
    return sum(size for pointer, size in own.items() if pointer not in shared)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    x = torch.randn(1, 3, 224, 224)
    net = dn.decompose(dn.models.resnet50().eval(), example_input=x)
    pairs = list(itertools.permutations(SIZES, 2))
    for source, target in pairs[:5]:
        net.resize_(macs=source), net.resize_(macs=target)
    times = []
    for source, target in pairs:
        net.resize_(macs=source)
        start = time.perf_counter()
        net.resize_(macs=target)
        times.append(time.perf_counter() - start)
    largest = 0
    for size in SIZES:
        net.resize_(macs=size)
        largest = max(largest, own_bytes(net))
    weights = sum(p.numel() * p.element_size() for p in net._base.parameters())
    median, worst = 1e3 * statistics.median(times), 1e3 * max(times)
    print(f"resize_: median {median:.1f} ms, slowest of {len(times)} changes {worst:.1f} ms")
    verdict("resize_, median ms", median, "under 10", median < 10)
    print(f"largest extra memory of a size: {largest / 2**20:.1f} MiB ({largest / weights:.2f} of the weights)")
    figures = {"median_ms": median, "slowest_ms": worst, "largest_extra_bytes": largest, "weight_bytes": weights}
    with torch.inference_mode():
        for size in (0.5, 0.25):
            net.resize_(macs=size)
            plain = net.extract()
            seconds = interleave({"resized": lambda: net(x), "extracted": lambda: plain(x)}, repeats=60, warmup=5)
            ratio = ratio_of_medians(seconds["resized"], seconds["extracted"])
            figures[f"resized_to_extracted_at_{size}"] = ratio
            verdict(f"inference at {size}, resized / extracted", ratio, "at most 1.05", ratio <= 1.05)
    record("resize", figures)


if __name__ == "__main__":
    main()
