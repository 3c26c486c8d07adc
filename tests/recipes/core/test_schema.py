"""Experiment files: every one resolves for every hardware, and wrong keys or types are refused."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from hydra.utils import get_class
from omegaconf import OmegaConf

from retime.recipes.__main__ import experiments
from retime.recipes.core.recipe import result_folder
from retime.recipes.core.schema import Hardware, Settings, register_all, settings_of
from retime.recipes.fusion.settings import FusionSettings
from retime.recipes.ooo.single_device import SingleDevice

PAGE = Path(__file__).parents[3] / "docs" / "recipes.md"
WORDS_OF_LAST_COLUMN = ", (simulated|counted)( without memory| from its plan|(?= in )|(?=, )|$)"
METERED = {"modnn_fig15": "a machine with a meter: RAPL or NVML"}


@pytest.fixture(autouse=True, scope="module")
def _hydra() -> Iterator[None]:
    register_all()
    with initialize_config_module("retime.conf", version_base="1.3"):
        yield


def composed(*overrides: str) -> Any:
    return settings_of(compose("config", list(overrides)))


@pytest.fixture(scope="module")
def hardware() -> dict[str, Any]:
    return {name: compose("config", [f"hardware={name}"]).hardware for name in ("cpu", "cuda")}


@pytest.mark.parametrize("name", sorted(experiments()))
def test_experiment_resolves(name: str, hardware: dict[str, Any]) -> None:
    config = compose("config", [f"experiment={name}"])
    for config.hardware in hardware.values():  # sizes are looked up by it when they are read
        settings = settings_of(config)
        assert isinstance(settings, Settings)
        assert settings.name == name
        assert settings.title


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(experiments()))
def test_experiment_takes_the_hardware_that_is_chosen(name: str) -> None:
    assert composed(f"experiment={name}", "hardware=cuda").hardware.device == "cuda"


def runs_on(experiment: Any) -> str:
    recipe, defaults = get_class(experiment.recipe), str(experiment.defaults)
    if "emulated" in defaults or re.search(r"\brate\b", str(experiment)):
        return "root"
    if "/hardware" in defaults or recipe.on_cpu == "counts without a device":
        return "simulated" if recipe.simulated else "counted"
    only_cpu = recipe is SingleDevice and not re.search("device: cuda", OmegaConf.to_yaml(experiment.cases))
    return "processor" if recipe.on_cpu or only_cpu else "processor or GPU"


def test_the_page_lists_each_experiment_once_with_its_paper_and_what_it_runs_on() -> None:
    """In the words of its file, but for those that the last column has."""
    page = PAGE.read_text(encoding="utf-8").partition("## All experiments")[2]
    sections = re.split(r"(?m)^(?:\[.*?#([\w-]+)\).*|This package:)$", page)[1:]
    listed = [
        (name, paper or "retime", *cells)
        for paper, rows in zip(sections[::2], sections[1::2], strict=True)
        for name, *cells in re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|.*\|$", rows, re.MULTILINE)
    ]
    wanted, files = [], experiments()
    for name, file in files.items():
        if name != "report":  # measures nothing
            experiment = OmegaConf.merge(files.get(str(file.defaults[0]), {}), file)
            where = re.sub(", simulated$", "", experiment.where)
            title = re.sub(WORDS_OF_LAST_COLUMN, "", experiment.title)
            on = METERED.get(name) or runs_on(experiment)
            wanted.append((name, experiment.paper, where[0].upper() + where[1:], title, on))
    assert sorted(listed) == sorted(wanted)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batchsize=4", "Key 'batchsize' not in 'FusionSettings'"),
        ("hardware.core=2", "Key 'core' not in 'Hardware'"),
        ("batch_size=four", "could not be converted to Integer"),
        ("rounds=2.5", "could not be converted to Integer"),
        ("variants=3", "Invalid value assigned"),
    ],
)
def test_wrong_setting_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigCompositionException) as refusal:
        composed("experiment=fusion_fig3", override)
    assert message in f"{refusal.value} {refusal.value.__cause__}"


@pytest.mark.parametrize(("override", "name"), [("+anything=1", "anything"), ("+hardware.speed=1", "hardware.speed")])
def test_added_key_is_refused(override: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is no setting of this experiment; there are"):
        composed("experiment=fusion_fig3", override)


def test_blocks_take_the_arguments_of_anybodys_function() -> None:
    settings = composed("experiment=fusion_fig3", "model._target_=my.library.network", "model.depth=4")
    assert settings.model == {"_target_": "my.library.network", "depth": 4}


def test_hardware_chooses_sizes_and_the_command_line_wins() -> None:
    assert composed("experiment=fusion_fig3").data["image_size"] == 64
    assert composed("experiment=fusion_fig3", "hardware=cuda").data["image_size"] == 224
    assert composed("experiment=fusion_fig3", "hardware=cuda", "data.image_size=32").data["image_size"] == 32


def test_folder_is_named_after_what_was_overridden() -> None:
    hardware = Hardware(name="cpu", device="cpu", cores=1)
    settings = FusionSettings(name="x", paper="optimizer-fusion", where="Figure 4", hardware=hardware)
    overrides = ["experiment=fusion_fig4", "hardware=cpu", "model.depth=3", "batch_size=4", "rerun=true", "minutes=9"]
    figure = "outputs/optimizer-fusion/figure-4/cpu"
    assert str(result_folder(settings, overrides, [])) == f"{figure}/batch_size=4/model.depth=3"
    # a point of the same figure needs no folder of its own
    assert str(result_folder(settings, overrides, ["batch_size"])) == f"{figure}/model.depth=3"
