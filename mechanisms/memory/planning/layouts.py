"""By which algorithms convolutions run best (moDNN, section 5.2.3), as far as the library lets that be chosen.

Per convolution the libraries choose by themselves: oneDNN by shape and layout, cuDNN by a trial of its own with
``torch.backends.cudnn.benchmark``, which leaves out what there is no room for. What is left to choose is the layout of
all of them. Another layout sums in another order, so it is measured and told, and not chosen without being asked for.
"""

from __future__ import annotations

import time
from dataclasses import replace

from torch import nn

from retime.mechanisms.memory.dry_run import DryRun, StepProfile, TrainingStep
from retime.mechanisms.memory.pool import within
from retime.mechanisms.memory.sandbox import channels_last, copies
from retime.mechanisms.storages import strided_bytes

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
_REPEATS = 3
_WORTH_TELLING = 1.1


def layout_hint(step: TrainingStep, plain: StepProfile, samples: int, budget_bytes: int) -> str:
    """What the other layout would gain, if it is worth a change of the model; empty if not, or if there is no room.

    Args:
        step: what to run, on copies.
        plain: a dry run of its whole batch.
        samples: so many at once.
        budget_bytes: for the step and the copies.
    """
    convolutions = [layer for layer in step.module.modules() if isinstance(layer, _CONVOLUTIONS)]
    given = step.given()
    each = max(1, (plain.peak_bytes - plain.resident_bytes) // step.samples)
    copied = strided_bytes((*step.module.parameters(), *step.module.buffers()))
    if not convolutions or plain.resident_bytes + 2 * copied + 2 * samples * each > budget_bytes:
        return ""
    if any(not layer.weight.is_contiguous() for layer in convolutions):
        return ""  # that layout was chosen already
    part = replace(step.of_size(samples), optimizers=(), gradients="freed", buckets="", reduction_bytes=0)
    times = {"as it is": float("inf"), "channels last": float("inf")}
    try:
        with within(given, budget_bytes):
            runs = {
                "as it is": DryRun(part, real=True, replacement=copies()),
                "channels last": DryRun(part, real=True, replacement=channels_last()),
            }
            for name in [*runs, *_REPEATS * [*runs]]:
                begin = time.perf_counter()
                runs[name].untraced()
                times[name] = min(times[name], time.perf_counter() - begin)
    except Exception:  # whatever a model says to another layout: a view() that does not fit it, say
        return ""
    gain = times["as it is"] / times["channels last"]
    if gain < _WORTH_TELLING:
        return ""
    return (
        f"in another layout convolutions would choose other algorithms: {samples} samples ran {gain:.2f} x as fast "
        "after model.to(memory_format=torch.channels_last)"
    )
