"""`python -m retime.recipes experiment=<name> [key=value ...]`, or without arguments the list of experiments."""

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


def experiments() -> dict[str, str]:
    """The shipped experiments, each with its one-line title."""
    folder = importlib.resources.files("retime.conf") / "experiment"
    found = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            settings = OmegaConf.create(file.read_text(encoding="utf-8"))
            found[file.name.removesuffix(".yaml")] = str(settings.title)
    return found


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
    recipe.run(settings, folder, console)
    report.rebuild(folder, console)
    if settings.record:
        report.list_results(Path(RECORDED))


def main() -> None:
    """Entry point. A sweep's `-m` may stand anywhere on the command line."""
    arguments = sys.argv[1:]
    flags = [argument for argument in arguments if argument in ("-m", "--multirun")]
    sys.argv[1:] = flags + [argument for argument in arguments if argument not in flags]
    register_all()
    hydra.main(config_path="pkg://retime.conf", config_name="config", version_base="1.3")(run)()


def _list(console: Console) -> None:
    table = Table("experiment", "what it measures", title="python -m retime.recipes experiment=<name> [key=value ...]")
    for name, title in experiments().items():
        table.add_row(name, title)
    console.print(table)
    console.print(f"Results go to {Path(OUTPUTS).resolve()} (results_dir=...). More: python -m retime.recipes --help")


if __name__ == "__main__":
    main()
