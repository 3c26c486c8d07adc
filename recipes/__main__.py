"""`python -m retime.recipes experiment=<name> [key=value ...]`, or without arguments the list of experiments.

`experiment=all` runs those of all papers, one after the other; with `hardware=cuda` those that have a form for a GPU.
"""

import importlib.resources
import sys
from pathlib import Path
from typing import Any

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf
    from rich.console import Console
    from rich.table import Table

    from retime.recipes import report
    from retime.recipes.core.recipe import Recipe, result_folder
    from retime.recipes.core.schema import OUTPUTS, RECORDED, register_all, settings_of
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the recipes need {error.name}, which is not installed: pip install 'lightning-retime[recipes]'",
        name=error.name,
    ) from error


def experiments() -> dict[str, Any]:
    """The shipped experiments, each with its file's settings."""
    files = sorted((importlib.resources.files("retime.conf") / "experiment").iterdir(), key=lambda file: file.name)
    files = [file for file in files if file.name.endswith(".yaml")]
    return {file.name.removesuffix(".yaml"): OmegaConf.create(file.read_text(encoding="utf-8")) for file in files}


_ALL = "experiment=all"


def of_papers(hardware: str = "") -> list[str]:
    """The experiments of papers that run on this hardware, or each on its own if none is chosen."""
    names = []
    for name, settings in experiments().items():
        if settings.get("paper") in ("all", "retime"):  # the report and what is no measurement
            continue
        chooses = any("override /hardware" in entry for entry in settings.defaults if not isinstance(entry, str))
        if not hardware or not (chooses or (hydra.utils.get_class(settings.recipe).on_cpu and hardware != "cpu")):
            names.append(name)
    return names


def run(config: DictConfig) -> None:
    """What Hydra calls with a checked configuration: once, or once a job of a sweep."""
    console = Console()
    if OmegaConf.is_missing(config, "recipe"):
        _list(console)
        return
    settings = settings_of(config)
    if settings.name == "report":
        report.rebuild(Path(settings.results_dir), console)
        return
    recipe: Recipe[Any] = hydra.utils.get_class(settings.recipe)()
    folder = result_folder(settings, HydraConfig.get().overrides.task, recipe.all_axes)
    try:
        result = recipe.run(settings, folder, console)
    except Exception as error:  # of a sweep, which goes on, Hydra tells the first one alone
        console.print(f"{settings.name}: {type(error).__name__}: {error}", markup=False)
        raise
    if result.points:
        report.rebuild(folder, console)
    if settings.record:
        report.list_results(Path(RECORDED))


def main() -> None:
    """Entry point. A sweep's `-m` may stand anywhere on the command line."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("-m", "--multirun")]
    sweep = len(arguments) < len(sys.argv) - 1 or _ALL in arguments
    hardware = [argument.partition("=")[2] for argument in arguments if argument.startswith("hardware=")]
    names = f"experiment={','.join(of_papers(*hardware[:1]))}" if _ALL in arguments else ""
    sys.argv[1:] = ["-m"] * sweep + [names if argument == _ALL else argument for argument in arguments]
    register_all()
    hydra.main(config_path="pkg://retime.conf", config_name="config", version_base="1.3")(run)()


def _list(console: Console) -> None:
    table = Table("experiment", "what it measures", title="python -m retime.recipes experiment=<name> [key=value ...]")
    for name, settings in experiments().items():
        table.add_row(name, settings.title)
    console.print(table)
    console.print(f"Results go to {Path(OUTPUTS).resolve()} (results_dir=...). More: python -m retime.recipes --help")


if __name__ == "__main__":
    main()
