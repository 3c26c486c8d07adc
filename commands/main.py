"""The `retime` script: reads its command line and runs the command, plan or advise."""

import argparse
import gc
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException

from retime.commands import advise, plan
from retime.commands.errors import one_line

_OF_RECIPES = ("hydra", "omegaconf", "sklearn", "transformers", "matplotlib", "rich")
"""Packages of the recipes extra, which --config needs, and a model of the user's may."""
_INSTALL = ': pip install "lightning-retime[recipes]"'


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `retime` script; returns the command's exit status, 2 where something went wrong."""
    options, words = _parsed(arguments)
    gc.freeze()  # collections, which planning asks for, then pass over what was imported: 0.4 s each
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside the user
    try:
        status: int = options.run(options, words)
        return status
    except ModuleNotFoundError as error:
        extra = (error.name or "").partition(".")[0] in _OF_RECIPES
        _say_error(options.command, error, _INSTALL if extra else ": is the folder right, and the environment?")
    except (ValueError, TypeError, OSError, ImportError, AttributeError, MisconfigurationException) as error:
        _say_error(options.command, error)
    except Exception as error:  # the user's own step, most likely: how it came about is what they need
        traceback.print_exc()
        _say_error(options.command, error)
    return 2


def _say_error(command: str, error: Exception, more: str = "") -> None:
    print(f"retime {command}: {one_line(error)}{more}", file=sys.stderr)


def _parsed(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Options, and all other words, which may stand between them."""
    parser = _Parser(prog="retime", description="Re-order one training step.")
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    for module in (plan, advise):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(
            name, help=module.SUMMARY, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.set_defaults(run=module.run, refuse=command.error)
        module.add_options(command)
    options, more = parser.parse_known_args(arguments)
    unknown = [word for word in more if word.startswith("-")]
    if unknown:
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    return options, [*options.words, *more]


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists what there is\n")


if __name__ == "__main__":
    sys.exit(main())
