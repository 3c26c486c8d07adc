"""`python -m retime.recipes experiment=<name> [key=value ...]`, or without arguments the list of experiments.

`experiment=all` runs those of all papers, one after the other; with `hardware=cuda` those that have a form for a GPU.
First it lists them, and warns if the machine is not quiet; with `list=true` that is all.
"""

import importlib.resources
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from retime.recipes import report
    from retime.recipes.core.machine import disturbances
    from retime.recipes.core.recipe import Recipe, result_folder
    from retime.recipes.core.schema import OUTPUTS, RECORDED, Settings, register_all, settings_of
    from retime.recipes.results_index import duration
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


_ALL, _LIST = "experiment=all", "list=true"


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
    given = sys.argv[1:]
    everything = _ALL in given
    arguments = [argument for argument in given if argument not in ("-m", "--multirun", _LIST if everything else "")]
    hardware = [argument.partition("=")[2] for argument in arguments if argument.startswith("hardware=")]
    names = f"experiment={','.join(of_papers(*hardware[:1]))}" if everything else ""
    sweep = everything or len(arguments) < len(given)
    sys.argv[1:] = ["-m"] * sweep + [names if argument == _ALL else argument for argument in arguments]
    register_all()
    start = hydra.main(config_path="pkg://retime.conf", config_name="config", version_base="1.3")
    if not everything or (_list_all(start) and _LIST not in given):
        start(run)()


def _list_all(start: Any) -> bool:
    """Print what a sweep will run and what disturbs it. False if Hydra was asked for something else (--hydra-help)."""
    console, disturbing = Console(), disturbances()
    table = Table("experiment", "points", "kept", "took when recorded", "needs", title=_ALL)

    def add(config: DictConfig) -> None:
        try:
            table.add_row(*_row(settings_of(config)))
        except Exception as error:  # its run is going to raise it
            table.add_row(config.name, escape(f"{type(error).__name__}: {error}"))

    quietly = "hydra/hydra_logging=none"  # Hydra names the jobs when they run
    sys.argv.insert([argument.partition("=")[0] for argument in sys.argv].index("experiment"), quietly)
    start(add)()
    sys.argv.remove(quietly)
    if not table.rows:
        return False
    console.print(table)
    if disturbing:
        said = f"This machine is not quiet, so that times will vary: {', '.join(disturbing)}"
        console.print(said, style="yellow", markup=False, soft_wrap=True)
    return True


def _row(settings: Settings) -> list[str]:
    """The list's cells of an experiment: points, those that a run here keeps, the recorded result's time, needs."""
    recipe: Recipe[Any] = hydra.utils.get_class(settings.recipe)()
    options = HydraConfig.get().overrides.task, recipe.all_axes
    recording = replace(settings, record=True, results_dir=OUTPUTS)
    here, recorded = (recipe.stored(each, result_folder(each, *options)) for each in (settings, recording))
    took = duration(sum(point.seconds for point in recorded.points))
    numbers = len(recipe.points(settings)), len(recipe.kept(settings, here))
    return [settings.name, *map(str, numbers), took, recipe.needs(settings)]


def _list(console: Console) -> None:
    table = Table("experiment", "what it measures", title="python -m retime.recipes experiment=<name> [key=value ...]")
    for name, settings in experiments().items():
        table.add_row(name, settings.title)
    console.print(table)
    console.print(f"Results go to {Path(OUTPUTS).resolve()} (results_dir=...). More: python -m retime.recipes --help")


if __name__ == "__main__":
    main()
