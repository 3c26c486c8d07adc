"""What a fresh process finds: errors that name the extra to install, and strategies that a configuration can name."""

from support.warm_start import WITHOUT_RETIME, run_program

MISSING = """
import importlib, sys
import retime  # which has torchmetrics import transformers, if that is there
for module, package, extra in (("retime.integrations.transformers", "transformers", "transformers"),
                               ("retime.integrations.transformers.memory_budget", "transformers", "transformers"),
                               ("retime.integrations.transformers", "accelerate", "transformers"),
                               ("retime.integrations.accelerate", "accelerate", "accelerate"),
                               ("retime.integrations.accelerate.memory_budget", "accelerate", "accelerate"),
                               ("retime.recipes.__main__", "hydra", "recipes")):
    sys.modules[package] = None  # as if it were not installed
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert f"pip install 'lightning-retime[{extra}]'" in str(error), error
        assert f" {package}, which is not installed" in str(error), error
    else:
        raise AssertionError(f"{module} does without {package}")
"""
CONFIGURED = """
from hydra.utils import instantiate
assert "retime" not in sys.modules
strategy = {"_target_": "retime.FusedOptimizerStrategy", "mode": "forward"}
settings = {"_target_": "lightning.pytorch.Trainer", "accelerator": "cpu", "logger": False, "strategy": strategy}
assert type(instantiate(settings).strategy).__name__ == "FusedOptimizerStrategy"
"""


def test_an_error_names_the_extra_that_is_missing() -> None:
    run_program(MISSING)


def test_a_configuration_names_a_strategy_that_nothing_has_imported() -> None:
    run_program(WITHOUT_RETIME + CONFIGURED)
