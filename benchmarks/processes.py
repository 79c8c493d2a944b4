"""Decompositions of a model that processes share out: two of them, at one thread each, against one at one thread.

Every process is bound to a core of its own. What is timed is all that a refresh of the bases takes, the exchange of the
factors included; in the same rounds, the first process makes all of them alone while the other one waits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _common import record, summary, verdict

from decomposable import models
from decomposable.core.bases import costs_of, owners_of, shared
from decomposable.core.layers import Layer, find_layers
from decomposable.core.processes import ALONE, Processes
from decomposable_edge.machine import usable_cpus

WANTED = 0.65


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--form", default="spatial")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.index is not None:
        _work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        more = ["--store", str(Path(folder) / "store"), "--index"]
        command = [sys.executable, *sys.argv, *more]
        others = [subprocess.Popen([*command, str(i)], env=environment) for i in range(options.processes)]
        if any(process.wait() for process in others):
            sys.exit("a process failed")


def _work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    cores = usable_cpus()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[options.index % len(cores)]})
    dist.init_process_group(
        "gloo", init_method=f"file://{options.store}", rank=options.index, world_size=options.processes
    )
    processes = Processes.of(None, torch.device("cpu"))
    torch.manual_seed(0)
    layers, _ = find_layers(getattr(models, options.model)(num_classes=100), options.form)
    one: list[float] = []
    together: list[float] = []
    for round_ in range(1 + options.repeats):
        dist.barrier()
        start = time.perf_counter()
        if processes.is_first:
            alone = shared(layers, ALONE)
        middle = time.perf_counter()
        dist.barrier()
        begin = time.perf_counter()
        found = shared(layers, processes)
        if round_:
            one.append(middle - start)
            together.append(time.perf_counter() - begin)
    if processes.is_first:
        pairs = [pair for name in alone for pair in zip(alone[name].spectra, found[name].spectra, strict=True)]
        largest = max(float((a - b).abs().max()) for a, b in pairs)
        _tell(options, one, together, layers, len(cores), largest)
    dist.barrier()
    dist.destroy_process_group()


def _tell(
    options: argparse.Namespace,
    one: list[float],
    together: list[float],
    layers: tuple[Layer, ...],
    cores: int,
    largest: float,
) -> None:
    each = costs_of(layers)
    owners = owners_of(each, options.processes)
    costs = [sum(each[name] for name, owner in owners.items() if owner == i) for i in range(options.processes)]
    ratio = statistics.median(together) / statistics.median(one)
    print(f"{options.model}, {options.form} form, {len(layers)} layers; shares by cost: {costs}")
    print(f"one process: {statistics.median(one):.2f} s; {options.processes}: {statistics.median(together):.2f} s")
    if cores < options.processes:
        print(f"there are {cores} cores for {options.processes} processes: this says nothing, and is not recorded")
        return
    verdict("time of the processes, as a part of one's", ratio, f"at most {WANTED}", ratio <= WANTED)
    figures = {
        "model": options.model,
        "form": options.form,
        "processes": options.processes,
        "ratio": ratio,
        "one": summary(one),
        "together": summary(together),
        "largest_difference_of_singular_values": largest,
    }
    record("processes", figures)


if __name__ == "__main__":
    main()
