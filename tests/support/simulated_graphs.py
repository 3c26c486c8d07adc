"""CUDA graphs of the simulation of CUDA (``simulated_cuda.py``): kernels that are kept while captured, and replayed.

While a stream is captured nothing is computed: operations leave memory as it is, what they make holds not-a-numbers,
and no random numbers are drawn. A replay issues the same kernels on the same memory, on the current stream and on the
side streams that joined the capture, with the same waits, so that orders of execution and the race checker see it as
any other work. As in CUDA these raise, and end the capture: the host reads a value or waits, a stream waits for an
event from outside of the capture, work of a side stream that the captured stream has not waited for at its end.

Faults of their own: the host computes, which no replay does; an operation whose first call on a stream is captured
(libraries make handles and workspaces then); a replay that uses memory from outside of the graph that has been freed.
What is made in a capture is kept as long as the graph. Not simulated: that its memory is used again inside of the
graph, and what a failed capture leaves behind.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from retime.foundations.torch_private.engine import without_dispatch_modes
from support.simulated_operations import Operation, caller, form_of, is_plain
from support.simulated_streams import Event, Stream

if TYPE_CHECKING:
    from support.simulated_cuda import SimulatedCuda

_NO_KERNEL = ("::empty", "::new_empty", "empty_like")


class Graph:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self.cuda = cuda
        self.actions: list[Callable[[Replay], None]] = []
        self.kept: list[Tensor] = []
        self.origin: Stream | None = None
        self.unjoined: dict[Stream, int] = {}
        """Side streams in the capture, and how many of their actions the origin has not waited for."""

    def replay(self) -> None:
        """Issue everything again."""
        if self.cuda.capture is not None:
            raise RuntimeError("a graph cannot be replayed while another is captured")
        replay = Replay(self)
        with self.cuda.lock:
            for action in self.actions:
                action(replay)

    def keep_kernel(self, operation: Operation, stream: Stream) -> Any:
        """In a capture: return what an operation makes, without values, and keep how to compute it."""
        cuda = self.cuda
        if operation.sees_values or operation.holds_the_host_up:
            raise RuntimeError(f"operation not permitted when stream is capturing: {operation.name} ({caller()})")
        forms = {id(leaf): form_of(leaf, block) for leaf in operation.tensors if (block := cuda._block_of(leaf))}
        given = operation.reads | operation.writes
        result, leaves = self._form(operation)
        self.kept += leaves
        cuda._note_results(operation, result, stream)  # which blocks it writes
        outputs = [
            (place, form_of(leaf, block))
            for place, leaf in enumerate(leaves)
            if (block := cuda._block_of(leaf)) is not None and block not in given
        ]
        for _, form in outputs:
            ctypes.memset(form.block.address, 0xFF, form.block.nbytes)
        if not given and any(word in operation.name for word in _NO_KERNEL):
            return result
        if operation.name not in cuda.warm[stream]:
            cuda.faults.append(f"first call of {operation.name} on {stream} is captured ({caller()})")
        self.unjoined[stream] = self.unjoined.get(stream, 0) + (stream is not self.origin)
        blocks = {*operation.reads, *operation.writes}
        run = operation.kernel(forms, outputs, blocks)
        operation.args, operation.kwargs, operation.tensors = (), {}, []  # a graph keeps no tensor from outside

        def issue(replay: Replay) -> None:
            here = replay.stream(stream)
            if any(block.storage is None or block.storage() is None for block in blocks):
                cuda.faults.append(f"a graph uses memory that has been freed: {operation.name}")
                return
            for block in blocks:
                block.pending += 1
            cuda._launch(here, run)
            cuda.deferred += not here.immediate
            if not operation.can_wait:
                here.execute(here.launched)
            cuda._tell_checker(operation, here)

        self.actions.append(issue)
        return result

    def _form(self, operation: Operation) -> tuple[Any, list[Tensor]]:
        """Return the result of an operation that has not run: arguments that it writes into, and new tensors."""
        if operation.func._schema.returns and all(r.alias_info is not None for r in operation.func._schema.returns):
            return operation.written_arguments(), []
        state = torch.default_generator.get_state()
        with without_dispatch_modes(), torch.no_grad():
            copies = tree_map(
                lambda leaf: torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).copy_(leaf)
                if isinstance(leaf, Tensor) and 0 not in leaf.stride() else leaf,
                (operation.args, operation.kwargs),
            )  # fmt: skip
            result = operation.func(*copies[0], **copies[1])
        torch.default_generator.set_state(state)
        return result, [leaf for leaf in tree_leaves(result) if is_plain(leaf)]

    def note_record(self, event: Event, stream: Stream) -> None:
        """An event is recorded on a stream of the capture."""
        event.capture = self, self.unjoined.get(stream, 0)  # type: ignore[attr-defined]
        self.actions.append(lambda replay: replay.event(event).record(replay.stream(stream)))

    def note_wait(self, stream: Stream, event: Event) -> None:
        """A stream waits for an event of the capture, and so takes part in it."""
        _, count = event.capture  # type: ignore[attr-defined]
        if stream is self.origin:
            if event.stream is not None and self.unjoined.get(event.stream) == count:
                self.unjoined[event.stream] = 0
        else:
            self.unjoined.setdefault(stream, 0)
        self.actions.append(lambda replay: self.cuda.wait(replay.stream(stream), replay.event(event)))


class Replay:
    """One replay: which streams and events stand for those of the capture."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._current = graph, graph.cuda.current_stream()
        self._events: dict[Event, Event] = {}

    def stream(self, captured: Stream) -> Stream:
        """The current one stands for that which was captured."""
        return self._current if captured is self._graph.origin else captured

    def event(self, captured: Event) -> Event:
        """An event of this replay."""
        return self._events.setdefault(captured, Event(self._graph.cuda))


class Capturing:
    """As ``torch.cuda.graph``."""

    def __init__(self, cuda: SimulatedCuda, graph: Graph, stream: Stream) -> None:
        self._cuda, self._graph, self._stream = cuda, graph, stream
        self._chosen = cuda.stream(stream)

    def __enter__(self) -> None:
        self._cuda.synchronize()
        self._chosen.__enter__()
        self._graph.origin = self._stream
        self._cuda.capture = self._graph

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cuda.capture = None
        self._chosen.__exit__(kind, error, trace)
        left = [stream for stream, count in self._graph.unjoined.items() if count and stream is not self._stream]
        if kind is None and left:
            raise RuntimeError(f"capturing stream has unjoined work on {left[0]}")
