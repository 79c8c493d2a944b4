"""Speech of many voices from a synthesiser, and the speaker encoder that somebody else trained (PyPI: resemblyzer)."""

from __future__ import annotations

import io
import shutil
import subprocess
import wave
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

RATE, WINDOW, STEP, MELS, FRAMES = 16_000, 400, 160, 40, 160

SENTENCES = (
    "The birch canoe slid on the smooth planks of the old boat house.",
    "Glue the sheet to the dark blue background before the evening comes.",
    "It is easy to tell the depth of a well by the sound of a stone.",
    "These days a chicken leg is a rare dish in the houses of the poor.",
    "Rice is often served in round bowls with a little salted fish.",
    "The juice of lemons makes fine punch when the summer is warm.",
    "The box was thrown beside the parked truck near the harbour wall.",
    "The hogs were fed chopped corn and garbage every single morning.",
    "Four hours of steady work faced us after the long and heavy rain.",
    "A large size in stockings is hard to sell in a town as small as this.",
    "The boy was there when the sun rose over the quiet northern bay.",
    "A rod is used to catch pink salmon in the river behind the mill.",
)
VOICES = tuple(
    f"en-us+{name}"
    for name in (
        *(
            "Alex",
            "Andrea",
            "Annie",
            "Denis",
            "Gene",
            "Jacky",
            "Lee",
            "Mario",
            "Michael",
            "Robert",
            "Steph",
            "Henrique",
        ),
        *(
            "anika",
            "edward",
            "linda",
            "max",
            "michel",
            "rob",
            "sandro",
            "travis",
            "victor",
            "belinda",
            "benjamin",
            "iven",
        ),
        *("kaukovalta", "marcelo", "norbert", "pablo", "pedro", "quincy", "zac", "adam", "antonio", "aunty", "boris"),
        *("david", "ed", "f1", "f3", "m5"),
    )
)


class SpeakerEncoder(nn.Module):
    """Three LSTMs and a `Linear`; embeddings are of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MELS, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    def forward(self, mels: Tensor) -> Tensor:
        """The embeddings of spectrograms (samples × frames × channels)."""
        _, (hidden, _) = self.lstm(mels)
        embedded = self.linear(hidden[-1]).relu()
        return embedded / embedded.norm(dim=1, keepdim=True)


def speaker_encoder(weights: Path) -> SpeakerEncoder:
    """The network with the weights of `pretrained.pt`."""
    model = SpeakerEncoder()
    state = torch.load(weights, map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({name: value for name, value in state.items() if not name.startswith("similarity")})
    return model.eval()


def spectrograms(voices: tuple[str, ...], sentences: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """1.6 seconds of every sentence by every voice, and whose it is."""
    if shutil.which("espeak-ng") is None:
        raise SystemExit("error: espeak-ng is not there; allowed: with Debian's package espeak-ng installed")
    mels, speakers = [], []
    for number, voice in enumerate(voices):
        for sentence in sentences:
            mel = _mel(_spoken(voice, sentence))
            mels.append(mel[20 : 20 + FRAMES])
            speakers.append(number)
    return torch.from_numpy(np.stack(mels)).float(), torch.tensor(speakers)


def _spoken(voice: str, sentence: str) -> np.ndarray:
    said = subprocess.run(["espeak-ng", "-v", voice, "--stdout", sentence], check=True, capture_output=True).stdout
    with wave.open(io.BytesIO(said)) as file:
        rate, data = file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), np.int16)
    sound = data.astype(np.float64) / 32768
    at = np.arange(0, len(sound) - 1, rate / RATE)
    sound = np.interp(at, np.arange(len(sound)), sound)
    return sound * 10 ** (-30 / 20) / max(np.sqrt((sound**2).mean()), 1e-9)  # −30 dBFS, as it was trained with


def _mel(sound: np.ndarray) -> np.ndarray:
    """Power in 40 bands of Slaney's mel scale."""
    padded = np.pad(sound, WINDOW // 2)
    starts = range(0, len(padded) - WINDOW, STEP)
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)
    power = np.abs(np.fft.rfft(np.stack([padded[s : s + WINDOW] * window for s in starts]), axis=1)) ** 2
    return power @ _bands().T


def _bands() -> np.ndarray:
    def to_mel(hertz: np.ndarray) -> np.ndarray:
        return np.where(hertz < 1000, hertz * 3 / 200, 15 + np.log(np.maximum(hertz, 1) / 1000) * 27 / np.log(6.4))

    def to_hertz(mel: np.ndarray) -> np.ndarray:
        return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))

    edges = to_hertz(np.linspace(0, float(to_mel(np.array(RATE / 2))), MELS + 2))
    at = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (at - low) / (centre - low), (high - at) / (high - centre)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)
