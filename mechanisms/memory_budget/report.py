"""What a memory budget says: what it decided and did, to print and to keep in a checkpoint; and its warnings.

They come when batches, or the path that they take through the model, change while training goes on: :class:`GraphPaths`
runs the step and looks at its path. Here are also budgets as text, and what limits the process's memory.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import psutil
import torch
from torch import Tensor

from retime.foundations.messages import Report, each_because, parse_bytes, show_bytes, warn_difference, warn_no_effect
from retime.foundations.parts import Certificate, loss_of
from retime.foundations.torch_private.engine import check_saved_values, loss_choices
from retime.mechanisms.memory_budget.offload import OffloadReport
from retime.mechanisms.memory_budget.search import PlanChoice
from retime.mechanisms.memory_budget.separability import Compared

# How much memory a process may use on a CPU: less than the machine has, in a container or under ``ulimit``.

_ROOT = Path("/")
_GROUPS = "sys/fs/cgroup"
# Where the memory controller's groups are mounted, and the file that limits one: version 2, alone or beside 1, and 1.
_UNIFIED = ((_GROUPS, "memory.max"), (f"{_GROUPS}/unified", "memory.max"))
_OLD = ((f"{_GROUPS}/memory", "memory.limit_in_bytes"),)


def shared_bytes() -> int:
    """Memory of all processes of this one's control group together: the machine's, or less.

    The limits of the group itself and of all groups around it count, of both versions of control groups.
    """
    return min([int(psutil.virtual_memory().total), *_group_limits()])


def own_bytes() -> int:
    """The same, or less where this process has limits of its own: ``RLIMIT_DATA`` and ``RLIMIT_AS``."""
    soft = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return min([shared_bytes(), *(limit for limit in soft if limit != resource.RLIM_INFINITY)])


def _group_limits() -> Iterator[int]:
    try:
        lines = (_ROOT / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # no Linux, or no control groups
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # A container sees its own group as the outermost.
        inside = PurePosixPath(*(part for part in PurePosixPath(group).parts if part not in ("/", "..")))
        for mounted, name in _OLD if controllers else _UNIFIED:
            for folder in (inside, *inside.parents):
                with suppress(OSError):
                    text = (_ROOT / mounted / folder / name).read_text().strip()
                    if text.isdigit():  # else "max"
                        yield int(text)


# A byte budget, as people write it.

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")


def parse_budget(budget: int | str, device: torch.device | str | int | None, sharing: int = 1) -> int:
    """The bytes that a budget means on ``device``.

    Args:
        budget: bytes, or a text: ``"8GiB"``, ``"500 MB"``, ``"90%"`` of the device's memory, or ``"auto"``, which is
            ``"90%"``. On a CPU the memory is the least of the machine's, the limits of the process's control group and
            of all groups around it (``memory.max`` or ``memory.limit_in_bytes``: a container's), ``RLIMIT_DATA`` and
            ``RLIMIT_AS``.
        device: where training runs; None where that is not known yet: only the form of bytes is checked then.
        sharing: processes on this machine; on a CPU they share a percentage, since they share the memory. Each has its
            own resource limits.

    Raises:
        TypeError: neither a whole number nor a text.
        ValueError: it cannot be read, is not above 0, or is more than the device has.
    """
    total = _device_bytes(device)
    if isinstance(budget, str) and budget.strip() == "auto":
        budget = "90%"
    percent = _PERCENT.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if percent:
        if not 0 < Fraction(percent[1]) <= 100:
            raise ValueError(f"budget={budget!r} must be above 0% and at most 100% of the device's memory")
        wanted = int(Fraction(percent[1]) / 100 * _device_bytes(device, sharing))
    else:
        wanted = parse_bytes("budget", budget, examples="'8GiB', '500MB', '90%' or 'auto'")
    if wanted < 1:
        raise ValueError(f"budget={budget!r} must be above 0")
    if wanted > total:
        raise ValueError(f"budget={budget!r} is {wanted} bytes, but {device} has {total}: give at most that, or '90%'")
    return wanted


def _device_bytes(device: torch.device | str | int | None, sharing: int = 1) -> int:
    """Memory that one of so many processes has."""
    if device is None:
        return sys.maxsize // sharing
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(shared_bytes() // sharing, own_bytes())


@dataclass(frozen=True)
class PlannedShape:
    """Decision for batches of one shape.

    Attributes:
        choice: the plan, its predicted peak and what it was chosen by.
        certificate: whether and how the batch may be split; None where it is not.
        note: why the prediction is not exact; empty if it is.
        source: where the plan comes from, if it was not made now.
        first_step_bytes: that tensors held at most in the first step, where that was trained without a plan; 0 before
            it has ended, or where nobody counts.
    """

    samples: int
    choice: PlanChoice
    certificate: Certificate | None = None
    note: str = ""
    source: str = ""
    first_step_bytes: int | None = None

    @property
    def plain(self) -> bool:
        """Return whether the plan asks for nothing: batches run as without a budget."""
        return not self.choice.plan.offload and self.choice.plan.sub_batch >= self.samples

    @property
    def why_whole(self) -> str:
        """Reason why it must not be split; empty where it may, or where nobody asked."""
        return "" if self.certificate is None else self.certificate.reason

    @property
    def decision(self) -> str:
        """Decision in words."""
        choice = self.choice
        text = f"batch of {self.samples}" + (" fits" if self.plain else f": {choice.plan}")
        if self.first_step_bytes is None:
            text += f"; predicted peak {show_bytes(choice.peak_bytes)}"
        elif self.first_step_bytes:
            text += f": it allocated {show_bytes(self.first_step_bytes)}"
        if choice.out_bytes:
            text += f", {show_bytes(choice.out_bytes + choice.in_bytes)} moved a step"
        if self.certificate is not None and self.certificate.separable:
            text += f"; {self.certificate}"
        return "; ".join(filter(None, (text, self.note, self.source)))

    def figures(self) -> dict[str, Any]:
        """Return the numbers by name."""
        choice = self.choice
        return {
            "samples": self.samples,
            "sub_batch": choice.plan.sub_batch,
            "offloaded_storages": len(choice.plan.offload),
            "peak_bytes": choice.peak_bytes,
            "moved_bytes": choice.out_bytes + choice.in_bytes,
            "step_ms": choice.step_ms,
            "plain_ms": choice.plain_ms,
            "first_step_bytes": self.first_step_bytes,
            "why_whole": self.why_whole,
        }

    def __str__(self) -> str:
        return self.decision + (f"; {self.certificate}" if self.why_whole else "")


@dataclass
class BudgetReport(Report):
    """Report of what was planned and done; sizes in bytes."""

    budget_bytes: int
    steps: int = 0
    """Batches."""
    sub_batches: int = 0
    """Forward passes of those batches."""
    plans: int = 0
    """Plans that were made or taken from a checkpoint."""
    shapes: list[PlannedShape] = field(default_factory=list)
    """The last of them."""
    offload: OffloadReport | None = None
    replanned: dict[str, int] = field(default_factory=dict)
    """Plans that were thrown away, by reason."""
    grown_bytes: int = 0
    """The most that the process grew by, with the model; 0 where it cannot be told."""

    def note(self, shape: PlannedShape, most: int) -> None:
        """A plan was made; only the last ``most`` are kept."""
        self.plans += 1
        self.shapes.append(shape)
        del self.shapes[:-most]

    def renew(self, before: PlannedShape, now: PlannedShape) -> None:
        """More is known of a shape."""
        self.shapes = [now if shape is before else shape for shape in self.shapes]

    def what_was_done(self) -> list[str]:
        did = f"memory budget {show_bytes(self.budget_bytes)}: {self.steps} steps in {self.sub_batches} sub-batches"
        return [did, *(shape.decision for shape in reversed(self.shapes) if not shape.plain)]

    def what_stayed_plain(self) -> list[str]:
        plain = (shape.decision.replace("; ", ", ") for shape in reversed(self.shapes) if shape.plain)
        fits = [f"{decision}: as without a budget" for decision in plain]
        whole = [f"batch of {one.samples} is not split: {one.why_whole}" for one in self.shapes if one.why_whole]
        return [*fits, *whole, *each_because(self.replanned, "replanned")]

    def what_was_measured(self) -> list[str]:
        texts = []
        if self.offload is not None and self.offload.storages:
            moved = show_bytes(self.offload.bytes_out + self.offload.bytes_in)
            texts.append(f"{moved} moved, {self.offload.stalls} waits for a copy")
        if self.grown_bytes:
            texts.append(f"the process grew by {show_bytes(self.grown_bytes)}")
        if self.grown_bytes > self.budget_bytes:
            texts[-1] += ", above the budget (a process's first steps load code once, which no budget counts)"
        return texts

    def figures(self) -> dict[str, Any]:
        return super().figures() | {"shapes": [shape.figures() for shape in self.shapes]}


# Notices that sub-batches compute something else than what was examined: a loss term from an epoch on, say.

_ENOUGH = 3


class AnotherPath(BaseException):  # no error: the caller begins the batch again, when this path has been examined
    """The first sub-batch of a batch took a path that nobody has examined."""


class GraphPaths:
    """The paths through the model that were examined, known by the graph that a forward pass makes.

    Those of the first batch are the ones that the certificate was given for.

    Args:
        constants: what entries of the batch are compared with is a part of a path too.

    Attributes:
        new: a pass has taken another path since.
        new_at_once: the first pass of the batch that is under way has: nothing of it has gone backward yet.
        passes: of that batch so far.
        stopped: so the batch was stopped, and begins again.
        examined: how often a new one turned out to be as separable as those before.
    """

    def __init__(self, constants: bool = False) -> None:
        self.new = self.new_at_once = self.stopped = False
        self.examined = 0
        check_saved_values()
        self._constants = constants
        self._known: set[int] = set()
        self._first = True
        self.passes = 0

    @property
    def many(self) -> bool:
        """The step takes another path from batch to batch: examining each would take longer than training."""
        return self.examined >= _ENOUGH

    def begin(self) -> None:
        """A batch begins."""
        self._first = not self._known
        self.passes, self.new_at_once = 0, False

    def accept(self) -> bool:
        """The new paths were examined; returns :attr:`stopped`."""
        stopped, self.stopped = self.stopped, False
        self.new = False
        self.examined += 1
        return stopped

    def run(self, step: Callable[[Any], Any], part: Any) -> Any:
        """A sub-batch's forward pass, whose path is seen; returns what the step returns."""
        if self.many:  # none is examined any more, and a path a step would fill the memory
            return step(part)
        compared = Compared() if self._constants else None
        with compared or nullcontext():
            output = step(part)
        path = _path_of(loss_of(output))
        if compared is not None:
            path = hash((path, frozenset(compared.constants)))
        if path not in self._known:
            self._known.add(path)
            new = not self._first
            self.new |= new
            self.new_at_once = new and not self.passes
        self.passes += 1
        return output


def _path_of(loss: Tensor) -> int:
    """A number for the graph behind a loss: its operations in order, how losses are reduced and what they ignore.

    And whether they weigh classes: only that, as any weights keep a batch whole. The saved tensor is not unpacked,
    which would bring it back from the host.
    """
    names: list[Any] = []
    waiting, seen = [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        name = node.name()
        names.append(name)
        if "Loss" in name or "CrossEntropy" in name:
            names += loss_choices(node)
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return hash(tuple(names))


OnShapeChange = Literal["replan", "error"]


def warn_of_dropped(error: Exception) -> None:
    """Plans that came with a checkpoint cannot be used."""
    warn_no_effect(f"plans of an earlier run have no effect, and batches are planned again: {error}")


def warn_of_paths(certificate: Certificate, paths: GraphPaths, stopped: bool) -> None:
    """After sub-batches that took another path than those before were examined.

    Args:
        stopped: nothing of that batch has gone backward.
    """
    if not certificate.separable:
        since, late, warn = "the last batch", " That batch ran in sub-batches all the same;", warn_difference
        if stopped:
            since, late, warn = "this batch", " It runs again, what it did outside of the model too;", warn_no_effect
        warn(
            f"from {since} on the step computes something else than the planned batch, and its sub-batches "
            f"no longer give the batch's gradient: {certificate.reason}.{late} from here on there is another plan",
            every_rank=True,
        )
    elif paths.many:
        warn_difference(
            f"the step takes another path through the model from batch to batch. {paths.examined + 1} were examined, "
            "and their sub-batches gave the batch's gradient; other paths are assumed to do the same",
            every_rank=True,
        )
