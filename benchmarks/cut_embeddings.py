"""What a cut without training keeps of networks that give embeddings and no logits: of speakers, of sentences.

    python benchmarks/cut_embeddings.py --speaker pretrained.pt
    python benchmarks/cut_embeddings.py --sentences minilm --pairs sts-train.csv

The speaker encoder is cut with 64 utterances of eight voices of a synthesiser (espeak-ng); of 32 others it is counted
how often the nearest utterance of another sentence is of the same voice. The sentence encoder is cut with --count
sentences of the pairs; of 600 other pairs it is Spearman's correlation of cosines and scores. Choices are made with
these: no figure here is one of a test set. Seconds are those of the processor.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _common import record
from torch import Tensor

import decomposable as dn

SIZES = (0.9, 0.7, 0.5, 0.35)
WAYS = ("by default", "output", "loss", "singular_value")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speaker", type=Path, help="pretrained.pt of resemblyzer")
    parser.add_argument("--sentences", type=Path, help="a folder of a sentence encoder for transformers")
    parser.add_argument("--pairs", type=Path, help="pairs of sentences with scores, tab-separated")
    parser.add_argument("--count", type=int, default=500, help="sentences that it is cut with")
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--sizes", nargs="+", type=float, default=list(SIZES))
    args = parser.parse_args()
    if args.speaker:
        speaker(args)
    if args.sentences:
        sentences(args)


def speaker(args: argparse.Namespace) -> None:
    from _speech import SENTENCES, VOICES, speaker_encoder, spectrograms

    model = speaker_encoder(args.speaker)
    seen, _ = spectrograms(VOICES[::5], SENTENCES[:8])
    voices, said = tuple(voice for voice in VOICES if voice not in VOICES[::5]), SENTENCES[4:]
    mels, speakers = spectrograms(voices, said)
    spoken = torch.arange(len(speakers)) % len(said)
    with torch.no_grad():
        full = model(mels)

    def measured(net: torch.nn.Module) -> dict[str, float]:
        with torch.no_grad():
            found = net(mels)
        cosines = (found @ found.T).masked_fill(spoken[:, None] == spoken[None], -2.0)
        hits = (speakers[cosines.argmax(dim=1)] == speakers).float().mean()
        return {"nearest": float(hits), "cosine": float((found * full).sum(dim=1).mean())}

    compared("speaker encoder", model, list(seen.split(16)), None, measured, args)


def sentences(args: argparse.Namespace) -> None:
    from transformers import AutoModel, AutoTokenizer

    encoder = AutoModel.from_pretrained(args.sentences).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.sentences)
    rows = [line.split("\t") for line in args.pairs.read_text().splitlines() if line]
    rows = [row for row in rows if len(row) > 6]
    order = np.random.default_rng(0).permutation(len(rows))
    fit, judged = [rows[i] for i in order[: args.count // 2]], [rows[i] for i in order[-600:]]

    def batches(texts: list[str]) -> list[dict[str, Tensor]]:
        return [dict(tokenizer(texts[i : i + 20], padding=True, return_tensors="pt")) for i in range(0, len(texts), 20)]

    def embedded(net: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        hidden = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1).float()
        return torch.nn.functional.normalize((hidden * mask).sum(dim=1) / mask.sum(dim=1), dim=1)

    scores = np.array([float(row[4]) for row in judged])
    ones, others = ([batches([row[i] for row in judged])] for i in (5, 6))
    full: list[Tensor] = []

    def measured(net: torch.nn.Module) -> dict[str, float]:
        with torch.no_grad():
            a, b = (torch.cat([embedded(net, batch) for batch in each[0]]) for each in (ones, others))
        if not full:
            full.append(a)
        ranks = [np.argsort(np.argsort(values)) for values in ((a * b).sum(dim=1).numpy(), scores)]
        return {"spearman": float(np.corrcoef(*ranks)[0, 1]), "cosine": float((a * full[0]).sum(dim=1).mean())}

    texts = [row[i] for row in fit for i in (5, 6)]
    compared("sentence encoder", encoder, batches(texts), embedded, measured, args)


def compared(
    name: str,
    model: torch.nn.Module,
    data: list[Any],
    forward: Callable[..., Any] | None,
    measured: Callable[[torch.nn.Module], dict[str, float]],
    args: argparse.Namespace,
) -> None:
    print("full:", full := measured(model), flush=True)
    for way in args.ways:
        start = time.process_time()
        options: dict[str, Any] = {"criterion": way} if way == "singular_value" else {"data": data}
        if way in ("output", "loss"):
            options["criterion"] = way
        net = dn.decompose(model, data[0], forward=forward, **options)
        seconds = time.process_time() - start  # of the processor
        found = {}
        for size in args.sizes:
            net.resize_(macs=size)
            found[f"{size:g}"] = measured(net)
        print(way, f"{seconds:.0f} s", found, net.cut_report or "", flush=True)
        report = net.cut_report.as_dict() if net.cut_report else None
        record(
            "cut_embeddings",
            {"network": name, "way": way, "full": full, "seconds": seconds, "sizes": found, "report": report},
        )


if __name__ == "__main__":
    main()
