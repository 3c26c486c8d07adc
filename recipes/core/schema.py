"""The recipes' settings as dataclasses. Hydra checks every key and type of a command line against them.

`Settings` is what every recipe has. A paper's recipes extend it in their `settings.py`, `SCHEMAS` names the extension,
and so does an experiment file in `conf/experiment/`: `defaults: [/schema: <name>]`.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.utils import get_class
from omegaconf import MISSING, DictConfig, OmegaConf

OUTPUTS, RECORDED = "outputs", "results"
"""Where recipes write, from the working directory on: git ignores the first, and the second is tracked."""


@dataclass
class Hardware:
    """Hardware that a recipe runs on: `conf/hardware/cpu.yaml`, `cuda.yaml` or `emulated.yaml`."""

    name: str = MISSING
    device: str = MISSING
    # processor cores to pin to, with as many torch threads; null leaves the machine's own choice
    cores: int | None = MISSING


@dataclass
class Settings:
    """Settings that every recipe takes."""

    name: str = MISSING  # of the experiment
    title: str = MISSING  # one line for the list of experiments
    paper: str = MISSING
    where: str = MISSING  # figure or table
    recipe: str = MISSING  # dotted path of a Recipe class
    hardware: Hardware = field(default_factory=Hardware)
    seed: int = 0
    rounds: int = 7  # measured rounds: each gives every variant one number
    warmup_rounds: int = 1
    steps: int = 5  # training steps in a round of a variant
    results_dir: str = OUTPUTS
    record: bool = False  # into RECORDED, for a commit
    rerun: bool = False  # measure finished points again
    minutes: float | None = None  # of a call, after which no other point begins
    allow_dirty: bool = False  # record although the working tree has changes, which the pages then say


def register(name: str, settings: type[Settings]) -> None:
    """Offer a settings class to experiment files as `/schema: <name>`.

    Blocks such as `model` take any key (`model.depth=4`), as their target may be anybody's function; `build` checks the
    keys against that function's signature. All other keys are checked here.
    """
    node = OmegaConf.structured(settings)
    for block in dataclasses.fields(settings):
        if block.default_factory is dict:
            OmegaConf.set_struct(node[block.name], False)
    ConfigStore.instance().store(group="schema", name=name, node=node, package="_global_")


SCHEMAS = {
    "settings": "core.schema.Settings",
    "fusion": "fusion.settings.FusionSettings",
    "ooo_measured": "ooo.settings.OutOfOrderSettings",
    "ooo_simulated": "ooo.settings.SimulatedSettings",
    "single_device": "ooo.settings.SingleDeviceSettings",
    "pipeline": "ooo.settings.PipelineSettings",
    "paper_pipeline": "ooo.settings.PaperPipelineSettings",
    "bppsa_recurrent": "bppsa.settings.RecurrentSettings",
    "bppsa_convolutional": "bppsa.settings.ConvolutionalSettings",
    "bppsa_plan": "bppsa.settings.ScanPlanSettings",
    "modnn": "modnn.settings.MemorySettings",
    "cpu_memory": "cpu_memory.settings.AllocatorSettings",
    "advice": "advice.settings.AdviceSettings",
    "cpuacc": "cpuacc.settings.AccumulationSettings",
}
"""Settings classes below `retime.recipes`, by the names that experiment files give them."""


def register_all() -> None:
    """Put these classes and the `by_hardware` resolver where Hydra finds them; harmless when repeated."""
    ConfigStore.instance().store(name="settings", node=Settings)
    for name, place in SCHEMAS.items():
        register(name, get_class(f"retime.recipes.{place}"))
    OmegaConf.register_new_resolver("by_hardware", _by_hardware, replace=True)


def settings_of(config: DictConfig) -> Settings:
    """The settings as the dataclass that the experiment names.

    Raises:
        ValueError: the command line added a key (`+key=value`) that the dataclass does not have.
    """
    settings = OmegaConf.to_object(config)
    assert isinstance(settings, Settings)
    for part, path in ((settings, ""), (settings.hardware, "hardware.")):
        names = {entry.name for entry in dataclasses.fields(part)}
        unknown = sorted(set(vars(part)) - names)
        if unknown:
            raise ValueError(
                f"{path}{unknown[0]} is no setting of this experiment; there are {', '.join(sorted(names))}"
            )
    return settings


def _by_hardware(sizes: DictConfig, *, _root_: DictConfig) -> Any:
    """`${by_hardware:{cpu: 64, cuda: 224}}` in an experiment file: the value for the chosen hardware."""
    name = _root_.hardware.name
    if name not in sizes:
        raise ValueError(f"this experiment has sizes for hardware={', '.join(map(str, sizes))}, not for {name}")
    return sizes[name]
