"""Mixed and other precisions, with and without a gradient scaler."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision

from contract.bench import Bench
from contract.models import Net, sgd
from contract.registry import fits
from contract.traits import NORM_CLIP, SCALER

fits(
    precision_bf16_mixed=lambda bench: bench.fit(Net(), precision="bf16-mixed", val=bench.loader(batches=1)),
    # On a CPU Lightning turns this into bf16-mixed; on a GPU it scales.
    precision_16_mixed=lambda bench: bench.fit(Net(), precision="16-mixed"),
    precision_64_true=lambda bench: bench.fit(Net(), precision="64-true", accumulate_grad_batches=2),
    precision_bf16_true=lambda bench: bench.fit(Net(optimizer=sgd), precision="bf16-true"),
    # Adafactor multiplies matrices in its update: under autocast, where a forward runs, they would be rounded.
    precision_bf16_mixed_adafactor=lambda bench: bench.fit(
        Net(optimizer=partial(torch.optim.Adafactor, lr=0.02)), precision="bf16-mixed"
    ),
)


def _scaled(bench: Bench, scale: float = 2.0**20, **kwargs: Any) -> None:
    # By default it starts so high that the first steps overflow and are skipped, then grows again every second step.
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    bench.fit(Net(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **kwargs)
    bench.keep("scaler", scaler.state_dict())


fits(
    SCALER,
    precision_with_scaler=lambda bench: _scaled(bench, loader=bench.loader(batches=5), max_epochs=3),
    precision_with_scaler_that_never_overflows=lambda bench: _scaled(bench, 2.0**4, accumulate_grad_batches=2),
)

fits(
    SCALER,
    NORM_CLIP,
    precision_with_scaler_clipping_and_accumulation=lambda bench: _scaled(
        bench, loader=bench.loader(batches=5), max_epochs=4, accumulate_grad_batches=2, gradient_clip_val=0.1
    ),
)
