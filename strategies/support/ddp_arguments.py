"""What strategies hand on to Lightning's ``DDPStrategy``; their signatures spell it out, for command lines to see."""

from typing import Annotated, Any, Literal

from retime.foundations.arguments import Above, AtMost

MegaBytes = Annotated[float, Above(0), AtMost(2**20)]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


def given(**arguments: Any) -> dict[str, Any]:
    """Those that were given: for the others Lightning and torch have defaults of their own."""
    return {name: value for name, value in arguments.items() if value is not None}
