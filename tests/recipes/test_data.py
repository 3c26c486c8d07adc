"""The recipes' data: shapes, types, seeds and splits of each dataset, and clear errors for missing or broken files."""

import pickle
import wave
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from retime.recipes import data
from retime.recipes.data.audio import CLIP_SAMPLES, FEATURE_SETS, cepstral_coefficients, mel_filters


def fingerprint(dataset: Any, count: int = 4) -> list[Tensor]:
    return [part for index in range(min(count, len(dataset))) for part in dataset[index]]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- bundled data -----------------------------------------------------------------------------------------------------


def test_digits_are_split_normalised_and_reproducible() -> None:
    pytest.importorskip("sklearn")
    train, val = data.digits(), data.digits("val")
    assert (len(train), len(val)) == (1438, 359)
    assert not train.is_synthetic
    inputs = torch.cat([train.inputs, val.inputs])
    assert inputs.shape == (1797, 1, 8, 8)
    assert inputs.dtype == torch.float32
    assert abs(float(inputs.mean())) < 1e-5
    assert abs(float(inputs.std()) - 1) < 1e-5
    assert train.targets.dtype == torch.int64
    assert set(val.targets.tolist()) == set(range(10))
    assert same(fingerprint(train), fingerprint(data.digits()))
    assert not same(fingerprint(train), fingerprint(data.digits(seed=1)))
    # in the shape that a network wants
    image, _ = data.digits("val", image_size=32, channels=3)[0]
    assert image.shape == (3, 32, 32)
    assert torch.equal(image[0], image[2])


def test_a_linear_network_learns_the_digits() -> None:
    pytest.importorskip("sklearn")
    train, val = data.digits(), data.digits("val")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(train.inputs), train.targets).backward()
        optimizer.step()
    assert float((model(val.inputs).argmax(1) == val.targets).float().mean()) > 0.9


def test_digit_masks_are_where_the_digits_are() -> None:
    pytest.importorskip("sklearn")
    image, mask = data.digit_masks("val", image_size=32)[0]
    assert torch.equal(mask, (image[0] > 0).long())
    assert 0 < float(mask.float().mean()) < 1


def test_next_byte_is_the_one_behind_the_window() -> None:
    text, ours = data.python_source(tokens=64, max_bytes=20_000), data.next_byte(max_bytes=20_000)
    assert torch.equal(ours.inputs, text.inputs)
    assert torch.equal(ours.targets[:-1], text.inputs[1:, 0])


def test_python_source_is_real_text_shifted_by_one_byte() -> None:
    train, val = (data.python_source(split, tokens=64, max_bytes=20_000) for split in ("train", "val"))
    assert (train.name, train.is_synthetic, train.num_classes) == ("python-source", False, 256)
    assert len(train) + len(val) == 19_999 // 64
    assert train.inputs.dtype == train.targets.dtype == torch.int64
    assert torch.equal(train.inputs[0, 1:], train.targets[0, :-1])
    # Windows follow one another, so the last target of one is the first input of the next.
    assert train.targets[0, -1] == train.inputs[1, 0]
    text = bytes(train.inputs.flatten().tolist()).decode(errors="replace")
    assert "def " in text
    assert "import " in text
    again = data.python_source(tokens=64, max_bytes=20_000)
    assert torch.equal(again.inputs, train.inputs)
    other = data.python_source(tokens=64, max_bytes=20_000, seed=1)
    assert not torch.equal(other.inputs[:100], train.inputs[:100])


def test_python_source_reads_another_folder_and_refuses_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="root="):
        data.python_source(root=tmp_path)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_bytes(b"x = 1\n" * 10)
    assert bytes(data.python_source(root=tmp_path, tokens=6).inputs[0].tolist()) == b"x = 1\n"
    with pytest.raises(ValueError, match="60 bytes make 1 windows of 50 tokens"):
        data.python_source(root=tmp_path, tokens=50)


# --- CIFAR ------------------------------------------------------------------------------------------------------------


def cifar_batch(seed: int, labels: int = 10, count: int = 3) -> tuple[np.ndarray, list[int]]:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (count, 3072), dtype=np.uint8)
    return pixels, generator.integers(0, labels, count).tolist()


def write_python_version(folder: Path, names: list[str], key: bytes, labels: int) -> None:
    folder.mkdir(parents=True)
    for seed, name in enumerate(names):
        pixels, targets = cifar_batch(seed, labels)
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, key: targets}, protocol=2))


def write_binary_version(folder: Path, names: list[str], labels: int) -> None:
    folder.mkdir(parents=True)
    for seed, name in enumerate(names):
        pixels, targets = cifar_batch(seed, labels)
        front = [[target] if labels == 10 else [0, target] for target in targets]
        (folder / f"{name}.bin").write_bytes(np.hstack([np.array(front, dtype=np.uint8), pixels]).tobytes())


CIFAR10_FILES = [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]


def test_cifar10_reads_both_versions_alike(tmp_path: Path) -> None:
    write_python_version(tmp_path / "a" / "cifar-10-batches-py", CIFAR10_FILES, b"labels", 10)
    write_binary_version(tmp_path / "b", CIFAR10_FILES, 10)
    for split, count in (("train", 15), ("val", 3)):
        pickled, binary = data.cifar10(tmp_path / "a", split), data.cifar10(tmp_path / "b", split)
        assert len(pickled) == count
        assert torch.equal(pickled.inputs, binary.inputs)
        assert torch.equal(pickled.targets, binary.targets)
        assert (pickled.name, pickled.num_classes, pickled.is_synthetic) == ("cifar10", 10, False)
    pixels, targets = cifar_batch(0)
    image, label = data.cifar10(tmp_path / "a" / "cifar-10-batches-py")[1]
    assert (image.shape, image.dtype, label.dtype) == ((3, 32, 32), torch.float32, torch.int64)
    assert int(label) == targets[1]
    # Red comes first, row by row; its mean and deviation are CIFAR-10's.
    torch.testing.assert_close(image[0, 0, 5], torch.tensor((pixels[1, 5] / 255 - 0.4914) / 0.2470).float())


def test_cifar100_takes_the_fine_labels(tmp_path: Path) -> None:
    write_python_version(tmp_path / "a", ["train", "test"], b"fine_labels", 100)
    write_binary_version(tmp_path / "b" / "cifar-100-binary", ["train", "test"], 100)
    pickled, binary = data.cifar100(tmp_path / "a"), data.cifar100(tmp_path / "b")
    assert pickled.targets.tolist() == binary.targets.tolist() == cifar_batch(0, 100)[1]
    assert pickled.num_classes == 100


def test_cifar_says_what_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"Nothing is downloaded.*synthetic_images"):
        data.cifar10(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither data_batch_1, .* nor the same names with \.bin"):
        data.cifar10(tmp_path)
    for name, content, message in (
        ("test_batch.bin", b"\0" * 100, r"test_batch\.bin' is not a cifar10 file"),
        ("test_batch.bin", b"\x0b" * 3073, "labels from 11 to 11"),
        ("test_batch", pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [1, 2]}), "float64"),
        ("test_batch", b"no pickle", "unpack the archive again"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            data.cifar10(tmp_path, "val")


class Malicious:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (Path("touched-by-a-pickle"),)


def test_cifar_runs_no_code_from_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(Malicious()))
    with pytest.raises(ValueError, match="asks for"):
        data.cifar10(tmp_path, "val")
    assert not (tmp_path / "touched-by-a-pickle").exists()


# --- folders of images ------------------------------------------------------------------------------------------------


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (20, 30), mode: str = "RGB") -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, colour).convert(mode).save(path)


def test_image_folder_reads_imagenets_layout(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_image(tmp_path / split / "n02" / "b.png", (255, 0, 0))
        write_image(tmp_path / split / "n01" / "a.JPEG", (0, 0, 0), mode="L")
        (tmp_path / split / "n01" / "notes.txt").write_text("no image")
    dataset = data.image_folder(tmp_path, "val", image_size=16)
    assert (len(dataset), dataset.classes, dataset.num_classes) == (2, ["n01", "n02"], 2)
    assert not dataset.is_synthetic
    (black, zero), (red, one) = sorted((dataset[0], dataset[1]), key=lambda example: int(example[1]))
    assert (int(zero), int(one), zero.dtype) == (0, 1, torch.int64)
    assert (red.shape, red.dtype) == ((3, 16, 16), torch.float32)
    torch.testing.assert_close(red[0], torch.full((16, 16), (1 - 0.485) / 0.229))
    torch.testing.assert_close(black[2], torch.full((16, 16), -0.406 / 0.225))


def test_image_folder_crops_the_centre(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "a").mkdir()
    picture = image.new("RGB", (96, 32), (0, 0, 0))
    picture.paste((255, 255, 255), (32, 0, 64, 32))  # the middle third is white
    for name in "xy":
        picture.save(tmp_path / "a" / f"{name}.png")
    pixels, _ = data.image_folder(tmp_path, "val", image_size=28, val_fraction=0.5)[0]
    assert float(pixels.min()) > 1.9


def test_image_folder_splits_one_tree_by_seed(tmp_path: Path) -> None:
    for index in range(10):
        write_image(tmp_path / f"class{index % 2}" / f"{index}.png", (index, 0, 0), size=(8, 8))
    train, val = (data.image_folder(tmp_path, split, image_size=8, val_fraction=0.3) for split in ("train", "val"))
    assert (len(train), len(val)) == (7, 3)
    assert not set(train.files) & set(val.files)
    assert val.files == data.image_folder(tmp_path, "val", image_size=8, val_fraction=0.3).files
    with pytest.raises(ValueError, match=r"val_fraction=0\.0"):
        data.image_folder(tmp_path, val_fraction=0.0)


def test_own_folders_come_in_a_seeded_order(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    for folder in ("one", "two/train", "two/val", "irmas"):
        for place in (tmp_path / folder / name / f"{number}__1" for name in ("cel", "voi") for number in range(20)):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.with_suffix(".wav" if folder == "irmas" else ".png").touch()
    for split in ("train", "val"):
        clips = data.irmas(tmp_path / "irmas", split, val_fraction=0.5).files
        folders = (data.image_folder(tmp_path / name, split, val_fraction=0.5) for name in ("one", "two"))
        orders = [[file for file, _ in folder.files] for folder in folders]
        assert all(
            [file.parent for file in files] != sorted(file.parent for file in files) for files in (*orders, clips)
        )


def test_image_folder_says_what_is_missing_or_broken(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    with pytest.raises(FileNotFoundError, match="Nothing is downloaded"):
        data.image_folder(tmp_path / "nowhere", name="imagenet")
    with pytest.raises(FileNotFoundError, match="imagenet: no images in class folders"):
        data.image_folder(tmp_path, name="imagenet")
    write_image(tmp_path / "train" / "a" / "1.png", (0, 0, 0))
    write_image(tmp_path / "val" / "b" / "1.png", (0, 0, 0))
    with pytest.raises(ValueError, match="different class folders"):
        data.image_folder(tmp_path)
    (tmp_path / "val" / "b").rename(tmp_path / "val" / "a")
    (tmp_path / "val" / "a" / "1.png").write_bytes(b"not a picture")
    with pytest.raises(ValueError, match=r"1\.png' is not a readable image"):
        data.image_folder(tmp_path, "val")[0]


# --- IRMAS ------------------------------------------------------------------------------------------------------------


def write_clip(
    path: Path, hertz: float = 440, frames: int = CLIP_SAMPLES, channels: int = 2, rate: int = 44100
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    time = torch.arange(frames) / rate
    tone = (torch.sin(2 * torch.pi * hertz * time * (1 + 0.1 * time)) * 12000).to(torch.int16)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone[:, None].repeat(1, channels).numpy().tobytes())


@pytest.mark.parametrize(("features", "shape"), [("S", (259, 38)), ("M", (517, 24)), ("L", (1034, 12))])
def test_irmas_features_have_the_papers_shapes(tmp_path: Path, features: str, shape: tuple[int, int]) -> None:
    write_clip(tmp_path / "IRMAS-TrainingData" / "cel" / "[cel][cla]0001__1.wav")
    write_clip(tmp_path / "IRMAS-TrainingData" / "voi" / "[voi][pop]0002__1.wav", frames=CLIP_SAMPLES - 50)
    splits = [data.irmas(tmp_path, split, features, val_fraction=0.5) for split in ("train", "val")]
    assert sorted(int(dataset[0][1]) for dataset in splits) == [0, 10]
    clip, label = splits[0][0]
    assert (clip.shape, clip.dtype, label.dtype) == (shape, torch.float32, torch.int64)
    assert FEATURE_SETS[features].shape == shape
    torch.testing.assert_close(clip.mean(0), torch.zeros(shape[1]), atol=1e-4, rtol=0)
    torch.testing.assert_close(clip.std(0, correction=0), torch.ones(shape[1]), atol=1e-3, rtol=0)
    # Both channels carry the same tone.
    torch.testing.assert_close(clip[:, : shape[1] // 2], clip[:, shape[1] // 2 :])


def test_mel_filters_answer_a_tone_in_its_own_band() -> None:
    filters = mel_filters(4096)
    assert filters.shape == (2049, 128)
    peaks = filters.argmax(dim=0)
    assert bool((peaks[1:] >= peaks[:-1]).all())
    mel = 2595 * torch.log10(torch.tensor(1 + 1000 / 700))
    top = 2595 * torch.log10(torch.tensor(1 + 22050 / 700))
    expected_band = int((mel / top * 129).round()) - 1
    assert int(filters[round(1000 / 22050 * 2048)].argmax()) in range(expected_band - 1, expected_band + 2)


def test_cepstral_coefficients_of_silence_are_zero() -> None:
    features = cepstral_coefficients(torch.zeros(2, CLIP_SAMPLES), FEATURE_SETS["S"])
    assert features.isfinite().all()
    assert float(features.abs().max()) < 0.1


def test_irmas_keeps_a_recordings_excerpts_together(tmp_path: Path) -> None:
    for recording in range(6):
        for excerpt in (1, 2):
            path = tmp_path / "pia" / f"[pia][jaz]{recording:04d}__{excerpt}.wav"
            path.parent.mkdir(exist_ok=True)
            path.touch()
    train, val = (data.irmas(tmp_path, split, val_fraction=0.34) for split in ("train", "val"))
    recordings = [{file.name.split("__")[0] for file in dataset.files} for dataset in (train, val)]
    assert (len(train), len(val)) == (8, 4)
    assert not recordings[0] & recordings[1]


def test_irmas_says_what_is_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="synthetic_irmas"):
        data.irmas(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"expected the folders of IRMAS-TrainingData, cel, cla"):
        data.irmas(tmp_path)
    with pytest.raises(ValueError, match="features='XL'"):
        data.irmas(tmp_path, features="XL")
    clips = tmp_path / "tru"
    write_clip(clips / "a__1.wav", channels=1)
    write_clip(clips / "b__1.wav", frames=1000)
    (clips / "c__1.wav").write_bytes(b"RIFF")
    dataset = data.irmas(tmp_path, val_fraction=0.34)
    dataset.files = sorted(clips.glob("*.wav"))
    for index, message in enumerate((r"\(1, 16, 44100\)", r"lasts 0\.02 s", "not a readable PCM WAV file")):
        with pytest.raises(ValueError, match=message):
            dataset[index]


# --- synthetic stand-ins ----------------------------------------------------------------------------------------------

SYNTHETIC: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...], int]] = [
    (partial(data.synthetic_images, num_classes=10, image_size=32), (3, 32, 32), (), 10),
    (data.synthetic_images, (3, 224, 224), (), 1000),
    (data.synthetic_irmas, (259, 38), (), 11),
    (partial(data.synthetic_irmas, features="M"), (517, 24), (), 11),
    (data.synthetic_tokens, (128,), (128,), 50257),
    (partial(data.synthetic_translation, tokens=9, vocab_size=50), (2, 9), (9,), 50),
    (partial(data.bitstreams, steps=7), (7, 1), (), 10),
]


@pytest.mark.parametrize(("make", "input_shape", "target_shape", "classes"), SYNTHETIC)
def test_synthetic_data_say_so_and_depend_on_seed_and_split(
    make: Callable[..., Any], input_shape: tuple[int, ...], target_shape: tuple[int, ...], classes: int
) -> None:
    dataset = make(length=20)
    assert dataset.is_synthetic
    assert dataset.name.startswith("synthetic-")
    assert (len(dataset), dataset.num_classes) == (20, classes)
    value, target = dataset[3]
    assert (tuple(value.shape), tuple(target.shape), target.dtype) == (input_shape, target_shape, torch.int64)
    assert 0 <= int(target.min()) <= int(target.max()) < classes
    assert same(fingerprint(dataset), fingerprint(make(length=20)))
    assert not same(fingerprint(dataset), fingerprint(make(length=20, seed=1)))
    assert not same(fingerprint(dataset), fingerprint(make("val", length=20)))
    assert not same(list(dataset[0]), list(dataset[1]))
    batch, _ = next(iter(DataLoader(dataset, batch_size=4)))
    assert tuple(batch.shape) == (4, *input_shape)


def test_synthetic_data_end_where_their_length_says() -> None:
    dataset = data.synthetic_tokens(length=3)
    assert len(list(dataset)) == 3  # iteration stops by IndexError
    assert same(list(dataset[-1]), list(dataset[2]))
    with pytest.raises(ValueError, match="length=0"):
        data.synthetic_tokens(length=0)


def test_synthetic_sentences_are_shifted_and_mostly_predictable() -> None:
    tokens, targets = data.synthetic_tokens(tokens=400)[0]
    assert torch.equal(tokens[1:], targets[:-1])
    predictable = float(((tokens + 1) % 50257 == targets).float().mean())
    assert 0.65 < predictable < 0.85
    # and translations are the source backwards
    pair, target = data.synthetic_translation()[5]
    source, shifted = pair
    assert torch.equal(source.flip(0), target)
    assert torch.equal(shifted[1:], target[:-1])
    assert int(shifted[0]) == 0


def test_bitstreams_follow_equation_8() -> None:
    dataset = data.bitstreams(steps=500, length=400)
    assert set(dataset.inputs.unique().tolist()) == {0.0, 1.0}
    for label in range(10):
        share = float(dataset.inputs[dataset.targets == label].mean())
        assert abs(share - (0.05 + 0.1 * label)) < 0.02


# --- what all share ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [data.digits, data.python_source, data.synthetic_images, data.bitstreams])
def test_an_unknown_split_and_unequal_lengths_are_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="split='test' is unknown: use 'train' or 'val'"):
        make("test")
    with pytest.raises(ValueError, match="2 inputs but 3 targets"):
        data.ArrayData("x", torch.zeros(2, 1), torch.zeros(3), num_classes=1)
