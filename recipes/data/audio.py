"""IRMAS (Bosch et al. 2012): which instrument plays, from three seconds of sound; BPPSA's GRU task (section 4.2).

Legend: S samples, C coefficients (of both channels together), T frames.
"""

from __future__ import annotations

import math
import os
import wave
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from retime.recipes.data.base import Example, check_split, existing_folder, shuffled, split_rows

SAMPLE_RATE_HZ = 44100
CLIP_SAMPLES = 3 * SAMPLE_RATE_HZ
MEL_BANDS = 128
# cello, clarinet, flute, acoustic guitar, electric guitar, organ, piano, saxophone, trumpet, violin, voice
INSTRUMENTS = ("cel", "cla", "flu", "gac", "gel", "org", "pia", "sax", "tru", "vio", "voi")


class FeatureSet(NamedTuple):
    """One column of BPPSA's table 3: coefficients a channel, window and hop in samples."""

    coefficients: int
    window: int
    hop: int

    @property
    def shape(self) -> tuple[int, int]:
        """(T, C) of a clip: frames, and both channels' coefficients without the first ones."""
        return 1 + CLIP_SAMPLES // self.hop, 2 * (self.coefficients - 1)


FEATURE_SETS = {"S": FeatureSet(20, 4096, 512), "M": FeatureSet(13, 2048, 256), "L": FeatureSet(7, 1024, 128)}


def feature_set(name: str) -> FeatureSet:
    """The set of BPPSA's table 3 called ``name``, of shape S (259, 38), M (517, 24) or L (1034, 12).

    Raises:
        ValueError: another name.
    """
    if name not in FEATURE_SETS:
        raise ValueError(f"features={name!r} is unknown: choose 'S', 'M' or 'L' (BPPSA's table 3)")
    return FEATURE_SETS[name]


@lru_cache(maxsize=8)
def mel_filters(window: int) -> Tensor:
    """Triangular filters ``(window // 2 + 1, MEL_BANDS)``, equally spaced in mel = 2595 log10(1 + f / 700)."""
    top_mel = 2595 * math.log10(1 + SAMPLE_RATE_HZ / 2 / 700)
    edges_hz = 700 * (10 ** (torch.linspace(0, top_mel, MEL_BANDS + 2, dtype=torch.float64) / 2595) - 1)
    bins_hz = torch.linspace(0, SAMPLE_RATE_HZ / 2, window // 2 + 1, dtype=torch.float64)[:, None]
    left, centre, right = edges_hz[:-2], edges_hz[1:-1], edges_hz[2:]
    rising, falling = (bins_hz - left) / (centre - left), (right - bins_hz) / (right - centre)
    # Every filter has the same area, so that wide high bands do not outweigh narrow low ones.
    return (torch.minimum(rising, falling).clamp(min=0) * (2 / (right - left))).float()


@lru_cache(maxsize=8)
def cosine_basis(coefficients: int) -> Tensor:
    """Orthonormal discrete cosine transform of type II, ``(MEL_BANDS, coefficients)``."""
    band = torch.arange(MEL_BANDS, dtype=torch.float64)[:, None] + 0.5
    basis = torch.cos(math.pi / MEL_BANDS * band * torch.arange(coefficients)) * math.sqrt(2 / MEL_BANDS)
    basis[:, 0] /= math.sqrt(2)
    return basis.float()


def cepstral_coefficients(samples: Tensor, features: FeatureSet) -> Tensor:
    """Mel-frequency cepstral coefficients ``(T, C)`` of ``samples`` ``(2, S)``, prepared as in BPPSA's section 4.2.

    The first coefficient (average power) of each channel is dropped, and each other one has mean 0 and variance 1 over
    the frames. Close to LibROSA's, which the paper used, but not equal: the mel scale here is logarithmic throughout.
    """
    hann = torch.hann_window(features.window)
    spectrum = torch.stft(
        samples, features.window, features.hop, window=hann, center=True, pad_mode="constant", return_complex=True
    )
    power = spectrum.abs().square().transpose(1, 2)
    decibel = 10 * torch.log10((power @ mel_filters(features.window)).clamp(min=1e-10))
    # Nothing below 80 dB under the clip's loudest band: otherwise digital silence makes up most of the variance.
    decibel = decibel.maximum(decibel.max() - 80)
    kept = (decibel @ cosine_basis(features.coefficients))[:, :, 1:]
    flat = kept.transpose(0, 1).flatten(1)
    # The floor turns a silent clip into zeros rather than not-a-number.
    return (flat - flat.mean(dim=0)) / flat.std(dim=0, correction=0).clamp(min=1e-3)


def read_clip(path: Path) -> Tensor:
    """Samples float32 ``(2, CLIP_SAMPLES)`` in -1..1 of a 16-bit stereo WAV file at 44.1 kHz.

    Up to 1 % more or less than three seconds is cut off or filled with silence.

    Raises:
        ValueError: another format or length, or no WAV file at all.
    """
    try:
        with wave.open(str(path), "rb") as file:
            form = (file.getnchannels(), 8 * file.getsampwidth(), file.getframerate())
            data = file.readframes(file.getnframes())
    except (wave.Error, EOFError) as error:
        raise ValueError(f"{str(path)!r} is not a readable PCM WAV file ({error}): unpack IRMAS again") from error
    wanted = (2, 16, SAMPLE_RATE_HZ)
    if form != wanted:
        raise ValueError(f"{str(path)!r} has (channels, bits, Hz) = {form}, but IRMAS clips have {wanted}")
    frames = len(data) // 4
    if abs(frames - CLIP_SAMPLES) > CLIP_SAMPLES // 100:
        raise ValueError(f"{str(path)!r} lasts {frames / SAMPLE_RATE_HZ:.2f} s, but IRMAS's training clips last 3 s")
    kept = min(frames, CLIP_SAMPLES)
    samples = torch.zeros(2, CLIP_SAMPLES)
    samples[:, :kept] = torch.frombuffer(bytearray(data), dtype=torch.int16)[: 2 * kept].view(-1, 2).t() / 2**15
    return samples


@dataclass(eq=False, repr=False)
class InstrumentClips(Dataset[Example]):
    """Clips read and transformed when asked for; see `irmas`."""

    name: str
    files: list[Path]
    features: FeatureSet
    is_synthetic = False
    num_classes = len(INSTRUMENTS)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Example:
        path = self.files[index]
        label = INSTRUMENTS.index(path.parent.name)
        return cepstral_coefficients(read_clip(path), self.features), torch.tensor(label)


def irmas(
    path: str | os.PathLike[str], split: str = "train", features: str = "S", val_fraction: float = 0.1, seed: int = 0
) -> InstrumentClips:
    """IRMAS's training clips from the user's copy, as the cepstral coefficients that BPPSA's GRU reads (table 3).

    Inputs float32 ``(T, C)``: (259, 38) for ``features="S"``, (517, 24) for "M", (1034, 12) for "L"; targets int64 in
    0..10, in the order of `INSTRUMENTS`. ``path`` is the folder with ``cel``, ``cla`` ..., or its parent. The
    validation split is a seeded ``val_fraction`` of the *recordings*: excerpts of one recording (``x__1.wav``,
    ``x__2.wav``) stay together, for they sound alike. The order is a seeded one.

    Raises:
        FileNotFoundError: no such folder, or no instrument folders with WAV files in it.
        ValueError: unknown split or feature set; later, a file that is no such clip.
    """
    check_split(split)
    chosen = feature_set(features)
    root = existing_folder(path, "irmas", "synthetic_irmas")
    if (root / "IRMAS-TrainingData").is_dir():
        root = root / "IRMAS-TrainingData"
    files = [file for instrument in INSTRUMENTS for file in sorted((root / instrument).glob("*.wav"))]
    if not files:
        raise FileNotFoundError(
            f"irmas: no <instrument>/<clip>.wav in {str(root)!r}: expected the folders of IRMAS-TrainingData, "
            f"{', '.join(INSTRUMENTS)}"
        )
    recordings = [file.stem.rsplit("__", 1)[0] for file in files]
    names = sorted(set(recordings))
    kept = {names[row] for row in split_rows(len(names), split, val_fraction, seed).tolist()}
    split_files = [file for file, recording in zip(files, recordings, strict=True) if recording in kept]
    order = shuffled(len(split_files), seed).tolist()
    return InstrumentClips(f"irmas-{features}", [split_files[row] for row in order], chosen)
