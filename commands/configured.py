"""What `--config` names, as Hydra puts it together. The only part of the commands that takes the extra `recipes`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import get_object
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn
from yaml import YAMLError  # type: ignore[import-untyped]  # comes with OmegaConf, without types

from retime.recipes.core import build
from retime.recipes.core.schema import register_all

_BLOCKS = ("model", "data", "optimizer", "batch_size")


def from_config(
    file: Path, overrides: Sequence[str], device: str, batch_size: int | None, has_optimizer: bool
) -> tuple[nn.Module, Any, Any]:
    """Return the model, its first batch or a LightningDataModule, and what makes an optimizer over parameters, or None.

    Args:
        file: the configuration.
        overrides: Hydra's, such as `model.width=64`.
        device: where the model goes.
        batch_size: in place of the configuration's.
        has_optimizer: the configuration need not name one, and is not asked for it.

    Raises:
        ValueError, OSError: Hydra cannot read it, it lacks something, or does not know what is overridden.
    """
    blocks = _blocks(file, overrides, device)
    _need(file, blocks, "model", "data")
    model = build.build_model(blocks["model"], torch.device(device), seed=0)
    data = _data_of(file, blocks, batch_size, torch.device(device))
    if not has_optimizer and not isinstance(model, LightningModule):
        _need(file, blocks, "optimizer")
    return model, data, partial(build.build_optimizer, blocks["optimizer"], flags={}) if blocks["optimizer"] else None


def _blocks(file: Path, overrides: Sequence[str], device: str) -> dict[str, Any]:
    """The parts of a configuration that a plan needs; interpolations elsewhere in it may need a running Hydra.

    Hydra puts it together: defaults, groups in the file's folder, overrides.
    """
    if not file.is_file():
        raise FileNotFoundError(f"--config {file}: there is no such file")
    if file.suffix != ".yaml":
        raise ValueError(f"--config {file}: Hydra reads files whose names end in .yaml")
    register_all()
    try:
        with initialize_config_dir(str(file.parent.resolve()), version_base="1.3"):
            composed = compose(file.stem, overrides=list(overrides))
    except (HydraException, YAMLError) as error:
        because = f": {error.__cause__}" if error.__cause__ else ""
        raise ValueError(f"--config {file}: {error}{because}") from error
    hardware = {"name": "cuda" if device.startswith("cuda") else "cpu"}
    settings = OmegaConf.merge({"hardware": hardware}, composed)
    blocks: dict[str, Any] = {}
    try:
        for key in _BLOCKS:
            value = OmegaConf.select(settings, key)
            whole = {"resolve": True, "throw_on_missing": True}
            blocks[key] = OmegaConf.to_container(value, **whole) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"--config {file}: {error.full_key}: {why}; write it there, or override it") from error
    return blocks


def _need(file: Path, blocks: dict[str, Any], *keys: str) -> None:
    missing = [key for key in keys if not blocks[key]]
    if missing:
        raise ValueError(
            f"{file} has no {', '.join(missing)}: a plan needs a model and data, for a data set a batch_size, and for "
            "a plain nn.Module an optimizer"
        )


def _data_of(file: Path, blocks: dict[str, Any], batch_size: int | None, device: torch.device) -> Any:
    """A LightningDataModule, or the first batch of a data set of `(input, target)` pairs."""
    block = blocks["data"]
    target = get_object(block["_target_"]) if "_target_" in block else None
    if isinstance(target, type) and issubclass(target, LightningDataModule):
        return build.build({**block, **({"batch_size": batch_size} if batch_size else {})})
    sized = {"batch_size": batch_size or blocks["batch_size"]}
    _need(file, sized, "batch_size")
    (batch,) = build.build_batches(block, sized["batch_size"], 1, device)
    return batch
