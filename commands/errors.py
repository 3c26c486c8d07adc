"""What the commands say beside their answers: progress, and errors in one line with their place in the user's code."""

import os
import sys
import sysconfig
import traceback
from pathlib import Path


def progress(text: str) -> None:
    """Say on stderr what is being done."""
    print(f"retime: {text}", file=sys.stderr, flush=True)


def check_folder(option: str, file: Path | None) -> None:
    """Raise ValueError if the file that an option names is a folder, or could not be written into one."""
    if file is not None and file.is_dir():
        raise ValueError(f"{option} {file} is a folder: name a file in it")
    if file is not None and not (file.absolute().parent.is_dir() and os.access(file.absolute().parent, os.W_OK)):
        raise ValueError(f"{option} {file}: there is no folder {file.parent} to write into; make it first")


def one_line(error: BaseException) -> str:
    """Line on what was wrong, and where if that was in code of the user's."""
    text, place = " ".join(str(error).split()), ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        spec = frame.f_globals.get("__spec__")  # under `python -m` it has the name that __name__ hides
        file, module = frame.f_code.co_filename, str(getattr(spec, "name", None) or frame.f_globals.get("__name__"))
        installed = "site-packages" in file or file.startswith(("<", *sysconfig.get_paths().values()))
        if not installed and not module.startswith("retime."):  # the innermost counts
            place = f"{file}, line {line}, in {frame.f_code.co_name}"
    return f"{place}: {type(error).__name__}: {text}" if place else text
