"""Models under `torch.compile`: compiled code runs as often as in plain steps, during the fit and after it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from contract.bench import Bench
from contract.models import FEATURES, Net
from contract.registry import scenario
from contract.traits import COMPILED


class Backend:
    """Counts what is compiled, and calls of compiled code."""

    def __init__(self, compiler: Callable[[Any, Any], Any] | None = None) -> None:
        self.compiled = self.calls = 0
        self.compiler = compiler

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1
        code = self.compiler(graph, inputs) if self.compiler else graph.forward

        def run(*args: Any) -> Any:
            self.calls += 1
            return code(*args)

        return run


class Block(nn.Module):
    """torch compiles its own modules in place only together with others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, FEATURES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).tanh())


def _fit(bench: Bench, module: Net, calls: Backend) -> None:
    torch._dynamo.reset()  # other rows' runs count against its limit for a function
    bench.fit(module)
    module.loss(next(iter(bench.loader())))
    bench.keep("compiled", {"calls": calls.calls})


@scenario(COMPILED)
def compiled_calls_of_a_submodule(bench: Bench) -> None:
    calls = Backend()
    _fit(bench, Net(torch.compile(Block(), backend=calls)), calls)


@scenario(COMPILED)
def compiled_calls_of_a_module_in_place(bench: Bench) -> None:
    calls, block = Backend(), Block()
    block.compile(backend=calls)
    _fit(bench, Net(block), calls)


class CompiledLoss(Net):
    """Compiles a function, and no module."""

    def __init__(self, calls: Backend) -> None:
        super().__init__()
        self.error = torch.compile(nn.functional.mse_loss, backend=calls)

    def loss(self, batch: Any) -> Tensor:
        return self.error(self(batch[0]), batch[1])


@scenario(COMPILED)
def compiled_calls_of_a_loss_function(bench: Bench) -> None:
    calls = Backend()
    _fit(bench, CompiledLoss(calls), calls)
