"""Budgeted steps in a process of their own, under a limit of data bytes that holds from before the plan is made.

    python memory_planning_worker.py conv|gpt BUDGET_BYTES BESIDE_BYTES

Prints a line of JSON for each of two fits of the same model: what the process grew by, how many plans were tried out,
and the plan's note. The first one has no limit, as a process loads code and Python's objects once, which is more or
less by machine and by what ran before. The second one's is the budget and BESIDE_BYTES.
"""

import gc
import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retime.foundations.cpu_pool.pool import trim_heap
from retime.foundations.measure import status_bytes
from retime.mechanisms.memory_budget import BudgetedStep, parse_host


def convolutions() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]:
    layers: list[nn.Module] = []
    for index in range(5):
        layers += [nn.Conv2d(24 if index else 3, 24, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
    batch = torch.randn(192, 3, 32, 32), torch.randint(0, 10, (192,))
    return net, batch, lambda part: nn.functional.cross_entropy(net(part[0]), part[1])


def transformer() -> tuple[nn.Module, tuple[Tensor, ...], Callable[[Any], Tensor]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), 0)
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "n_positions": 64, "vocab_size": 2048}
    net = GPT2LMHeadModel(GPT2Config(**sizes, **quiet, **special))
    return net, (torch.randint(0, 2048, (32, 64)),), lambda part: net(input_ids=part[0], labels=part[0]).loss


def fit(kind: str, budget_bytes: int, beside_bytes: int | None) -> dict[str, Any]:
    torch.manual_seed(0)
    net, batch, loss = {"conv": convolutions, "gpt": transformer}[kind]()
    optimizer = torch.optim.Adam(net.parameters())
    model_bytes = sum(parameter.nbytes for parameter in net.parameters())
    if beside_bytes is not None:
        limit_bytes = status_bytes("VmData") - model_bytes + budget_bytes + beside_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    said: list[str] = []
    step = BudgetedStep(net, [optimizer], budget_bytes, parse_host(None, "cpu"), say=said.append)
    for _ in range(2):
        step.run(loss, batch)
        optimizer.step()
        optimizer.zero_grad()
    report = step.report()
    step.remove()
    tried = sum("trying plan" in line for line in said)
    return {"grown": report.grown_bytes, "tried": tried, "note": report.shapes[-1].note, "report": str(report)}


def main() -> None:
    kind, budget_bytes, beside_bytes = sys.argv[1], *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    for beside in (None, beside_bytes):
        print(json.dumps(fit(kind, budget_bytes, beside)))
        gc.collect()
        trim_heap()


if __name__ == "__main__":
    main()
