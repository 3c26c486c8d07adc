"""One of two ranks of mechanisms/pipeline/test_torch_csv.py: a schedule under ours, and as CSV in torch's runtime."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

from retime.mechanisms.pipeline import PipelineStep
from retime.schedules.pipeline import (
    block,
    from_csv,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    modulo,
    one_forward_one_backward,
    placement_of,
    to_csv,
    v_shape,
    zb_h1,
    zbv,
)

MICRO_BATCHES, LAYERS, STEPS, WIDTH = 4, 4, 3, 144  # a weight is 81 KiB: more than what is computed in order
ORDERS = {
    "gpipe": gpipe(block(2, 2), MICRO_BATCHES, first_output_gradient=True),
    "1f1b": one_forward_one_backward(block(2, 2), MICRO_BATCHES, first_output_gradient=True),
    "zb_h1": zb_h1(block(2, 2), MICRO_BATCHES, first_output_gradient=True),
    "interleaved": interleaved(modulo(4, 2), MICRO_BATCHES, first_output_gradient=True),
    "interleaved_zero_bubble": interleaved_zero_bubble(modulo(4, 2), MICRO_BATCHES, first_output_gradient=True),
    "zbv": zbv(v_shape(4, 2), MICRO_BATCHES, first_output_gradient=True),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, WIDTH, generator=generator)) for _ in range(STEPS)]  # type: ignore[misc]


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def ours(name: str, stages: int) -> list[Tensor]:
    """Weights after some steps of PipelineStep."""
    net = network()
    firsts = [str(layer) for layer in range(0, LAYERS, LAYERS // stages)]
    pipeline = PipelineStep(net, microbatches=MICRO_BATCHES, schedule=name, split=firsts)
    optimizer = optimizer_of([*net.parameters()])
    for inputs, targets in batches():
        pipeline.train(lambda part: mse_loss(net(part[0]), part[1]), (inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    pipeline.restore()
    return [parameter.detach() for parameter in net.parameters()]


def torchs(path: Path) -> dict[int, Tensor]:
    """Weights of this rank's stages after the same steps of torch's runtime, by number."""
    net, placement = network(), placement_of(from_csv(path.read_text()))
    layers = LAYERS // placement.stages
    mine = [stage - 1 for stage in placement.stages_of(dist.get_rank())]
    modules = {stage: net[stage * layers : (stage + 1) * layers] for stage in mine}
    stages = [PipelineStage(modules[one], one, placement.stages, torch.device("cpu")) for one in mine]
    runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=mse_loss)
    runtime._load_csv(str(path))
    optimizer = optimizer_of([parameter for module in modules.values() for parameter in module.parameters()])
    for inputs, targets in batches():
        first = (inputs,) if 0 in mine else ()
        last = {"target": targets} if placement.stages - 1 in mine else {}
        runtime.step(*first, return_outputs=False, **last)
        optimizer.step()
        optimizer.zero_grad()
    places = {id(parameter): number for number, parameter in enumerate(net.parameters())}
    return {places[id(p)]: p.detach() for module in modules.values() for p in module.parameters()}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, schedule in ORDERS.items():
        path = Path(folder, f"{name} {dist.get_rank()}.csv")
        path.write_text(to_csv(schedule))
        expected, found = ours(name, placement_of(schedule).stages), torchs(path)
        assert len(found) == LAYERS
        assert [place for place, one in found.items() if not torch.equal(one, expected[place])] == [], name
        print(name, flush=True)
    print("done", flush=True)
    dist.barrier()
    os._exit(0)  # a gloo thread that ends while the interpreter shuts down aborts the process


if __name__ == "__main__":
    main(*sys.argv[1:])
