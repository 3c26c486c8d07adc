"""Where sub-batches ran, callbacks and the optimizer see the loss and the outputs of the whole batch."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult


class WholeBatchResults:
    """Lets callbacks see the loss and the outputs of the whole batch, which are known after backward.

    So does the optimizer, which may read the loss that its closure returns: LBFGS searches by it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._whole: dict[str, Any] | None = None
        self._result: ClosureResult | None = None
        taken, made = self._take, self._made

        class Result(ClosureResult):
            def __post_init__(self) -> None:
                super().__post_init__()
                made(self)

            def asdict(self) -> dict[str, Any]:
                whole = taken()
                return super().asdict() if whole is None else whole

        self._loop.output_result_cls = _Results(Result)  # type: ignore[assignment]

    def put(self, output: Any, accumulated: int) -> None:
        """What ``training_step`` would have returned; ``accumulated``: batches that its loss is divided by."""
        whole = dict(output) if isinstance(output, dict) else {"loss": output}
        whole["loss"] = whole["loss"] / accumulated
        self._whole = whole
        result, self._result = self._result, None
        if result is not None:
            result.loss = whole["loss"]

    def remove(self) -> None:
        self._loop.__dict__.pop("output_result_cls", None)

    def _made(self, result: ClosureResult) -> None:
        self._result = result

    def _take(self) -> dict[str, Any] | None:
        whole, self._whole = self._whole, None
        return whole


class _Results:
    """Makes a loop's results; a copy of the loop has Lightning's class again, as nobody puts whole batches there."""

    def __init__(self, kind: type[ClosureResult]) -> None:
        self._kind = kind

    def from_training_step_output(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._kind.from_training_step_output(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _lightnings_results, ()


def _lightnings_results() -> type[ClosureResult]:
    return ClosureResult
