"""Mixed and other precisions, with and without a gradient scaler."""

from functools import partial

import torch
from lightning.pytorch.plugins import MixedPrecision

from contract.bench import Bench
from contract.models import Net, sgd
from contract.registry import fits, scenario
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


def _scaled(scale: float = 2.0**20) -> MixedPrecision:
    # By default it starts so high that the first steps overflow and are skipped, then grows again every second step.
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    return MixedPrecision("16-mixed", "cpu", scaler)


@scenario(SCALER)
def precision_with_scaler(bench: Bench) -> None:
    plugin = _scaled()
    bench.fit(Net(), loader=bench.loader(batches=5), plugins=[plugin], max_epochs=3)
    bench.keep("scaler", plugin.scaler.state_dict())


@scenario(SCALER, NORM_CLIP)
def precision_with_scaler_clipping_and_accumulation(bench: Bench) -> None:
    plugin = _scaled()
    bench.fit(
        Net(),
        loader=bench.loader(batches=5),
        plugins=[plugin],
        max_epochs=4,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
    )
    bench.keep("scaler", plugin.scaler.state_dict())


@scenario(SCALER)
def precision_with_scaler_that_never_overflows(bench: Bench) -> None:
    plugin = _scaled(2.0**4)
    bench.fit(Net(), plugins=[plugin], accumulate_grad_batches=2)
    bench.keep("scaler", plugin.scaler.state_dict())
