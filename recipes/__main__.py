"""`python -m retime.recipes experiment=<name> [key=value ...]`, or without arguments the list of experiments.

`experiment=all` runs those of all papers, one after the other; with `hardware=cuda` those that have a form for a GPU.
First it lists them, with those that it leaves out and why, and warns if the machine is not quiet; with `list=true` that
is all. Its last line says how many points are left.
"""

import importlib.resources
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

try:
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf
    from rich.console import Console
    from rich.table import Table

    from retime.recipes import report
    from retime.recipes.core.machine import disturbances
    from retime.recipes.core.recipe import Recipe, result_folder
    from retime.recipes.core.results import FILE
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
    """Run a checked configuration: Hydra calls this once, or once a job of a sweep."""
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
        if recipe.run(settings, folder, console).points:
            report.write(folder / FILE, console)
    except Exception as error:  # of a sweep, which goes on, Hydra tells the first one alone
        console.print(f"{settings.name}: {type(error).__name__}: {error}", markup=False)
        raise
    if settings.record:
        report.list_results(Path(RECORDED))


def main() -> None:
    """Entry point. A sweep's `-m` may stand anywhere on the command line."""
    given = sys.argv[1:]
    everything = _ALL in given
    arguments = [argument for argument in given if argument not in ("-m", "--multirun", _LIST if everything else "")]
    hardware = [argument.partition("=")[2] for argument in arguments if argument.startswith("hardware=")]
    if everything and not {*hardware} <= {"cpu", "cuda"}:
        sys.exit(f"{_ALL} takes hardware=cpu or hardware=cuda: run those of hardware={','.join(hardware)} by name")
    chosen = OmegaConf.from_dotlist([each for each in arguments if each.startswith(("rerun=", "minutes="))])
    if chosen.get("rerun") and chosen.get("minutes") is not None:
        sys.exit("rerun=true begins with the first point in every call, so that with minutes= some are never reached")
    names = f"experiment={','.join(of_papers(*hardware[:1]))}" if everything else ""
    sweep = everything or len(arguments) < len(given)
    sys.argv[1:] = ["-m"] * sweep + [names if argument == _ALL else argument for argument in arguments]
    register_all()
    start = hydra.main(config_path="pkg://retime.conf", config_name="config", version_base="1.3")
    if not everything:
        start(run)()
    elif (jobs := _list_all(start)) and _LIST not in given:
        _run_all(start, jobs)


def _list_all(start: Any) -> int:
    """Print what a sweep will run, leaves out and is disturbed by. Its number of runs, 0 if asked for --hydra-help."""
    console, disturbing, names = Console(), disturbances(), Counter[str]()
    table = Table("experiment", "points", "kept", "took when recorded", "needs", title=_ALL)
    left_out: list[str] = []

    def add(config: DictConfig) -> None:
        try:
            table.add_row(*_row(settings_of(config)))
            names[config.name] += 1
        except Exception as error:  # its run would raise it
            left_out.append(f"{config.name} is left out: {type(error).__name__}: {error}")

    quietly = "hydra/hydra_logging=none"  # Hydra names the jobs when they run
    place = [argument.partition("=")[0] for argument in sys.argv].index("experiment")
    sys.argv.insert(place, quietly)
    start(add)()
    sys.argv.remove(quietly)
    for line in left_out:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not names and left_out:
        sys.exit(f"{_ALL}: none is left to run")
    if not names:
        return 0
    sys.argv[place] = f"experiment={','.join(names)}"
    console.print(table)
    if disturbing:
        warning = f"This machine is not quiet, so that times will vary: {', '.join(disturbing)}"
        console.print(warning, style="yellow", markup=False, soft_wrap=True)
    return names.total()


def _run_all(start: Any, jobs: int) -> None:
    """Run a sweep. Its last line counts what is left, as minutes were over, an experiment failed, or it was stopped."""
    left: list[int] = []

    def count(config: DictConfig) -> None:
        try:
            run(config)
        finally:
            left.append(_left(settings_of(config)))

    try:
        start(count)()
    finally:
        after = f", and {jobs - len(left)} experiments have not begun" if jobs > len(left) else ""
        Console().print(f"{_ALL}: {sum(left)} points of {len(left)} experiments are left{after}", highlight=False)


def _left(settings: Settings) -> int:
    """Number of points that a folder does not hold yet."""
    recipe: Recipe[Any] = hydra.utils.get_class(settings.recipe)()
    here = recipe.stored(settings, result_folder(settings, HydraConfig.get().overrides.task, recipe.all_axes))
    return len(recipe.points(settings)) - len(recipe.kept(replace(settings, rerun=False), here))


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
