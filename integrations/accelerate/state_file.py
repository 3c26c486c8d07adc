"""A file of our own in the folders of ``accelerator.save_state()``.

``accelerator.register_for_checkpointing`` counts objects: a folder saved with one more can only be loaded with one
more. A file beside them is ignored by plain code, and a folder without it is as good.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from retime.foundations.messages import warn_no_effect


class StateFile:
    """Writes ``save()`` with each saved state, by rank zero, and gives ``load`` what a loaded folder holds of it.

    Args:
        accelerator: whose ``save_state`` and ``load_state`` are followed.
        name: of the file; a second object of the same name gets a number.
        save: gives plain types, for JSON; nothing (an empty mapping) leaves no file.
        load: takes them, on all ranks; not called for a folder that has none.
    """

    def __init__(
        self, accelerator: Accelerator, name: str, save: Callable[[], dict[str, Any]], load: Callable[[Any], None]
    ) -> None:
        taken: Counter[str] = accelerator.__dict__.setdefault("_retime_state_files", Counter())
        self._file = f"retime_{name}_{taken[name]}.json"
        taken[name] += 1
        self._accelerator, self._save, self._load = accelerator, save, load
        self._handles = [
            accelerator.register_save_state_pre_hook(self._write),
            accelerator.register_load_state_pre_hook(self._read),
        ]

    def remove(self) -> None:
        """Write and read no more."""
        for handle in self._handles:
            handle.remove()

    def _write(self, models: Any, weights: Any, folder: str) -> None:
        state, path = self._save(), Path(folder, self._file)
        if not self._accelerator.is_main_process:
            return
        if state:
            path.write_text(json.dumps(state))
        else:
            path.unlink(missing_ok=True)

    def _read(self, models: Any, folder: str) -> None:
        states = [self._found(Path(folder, self._file)) if self._accelerator.is_main_process else None]
        if self._accelerator.num_processes > 1:
            broadcast_object_list(states)  # ranks that knew different things would do different things
        if states[0] is not None:
            self._load(states[0])

    def _found(self, path: Path) -> Any:
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            warn_no_effect(f"{path} has no effect, as it cannot be read: {error}")
            return None
