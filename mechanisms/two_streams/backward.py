"""One step on two streams: output gradients on the main one, weight gradients beside it (Oh et al. 2022, section 4.1).

Weight gradients run in the order in which they become ready, the order that section 8.2 finds to give most of the gain;
:func:`retime.schedules.joint_schedule` finds others. On a CPU a profile chooses the layers whose weight gradients are
worth a second core. All of them have reached their parameters when ``backward()`` returns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from retime.foundations.arguments import AtLeast, checked
from retime.foundations.messages import (
    Report,
    each_because,
    format_counts,
    parse_bytes,
    show_bytes,
    warn_difference,
    warn_no_effect,
)
from retime.foundations.streams import has_streams
from retime.foundations.torch_private.engine import dispatch_mode_count, graph_task_id, queue_callback
from retime.foundations.torch_private.tensors import version_of
from retime.mechanisms.fusion import BackwardFusion, FusedParameter, FusionReport, check_can_fuse_in_backward
from retime.mechanisms.two_streams.graph import GraphedPart, GraphReport, parts_of, report_of
from retime.mechanisms.two_streams.layers import NOT_SPLIT, SEVERAL_USES, Parameters, SplitLayer, split_layers
from retime.mechanisms.two_streams.regions import RegionProfile
from retime.mechanisms.two_streams.search import (
    STEPS_TO_SECOND_LOOK,
    Profile,
    Search,
    Setting,
    settings_for,
    with_layers,
)
from retime.mechanisms.two_streams.sub_stream import Job, SubStream, SubStreamFusion, add_gradient, sub_stream_of

STEPS_TO_SEE = 3
"""In the first step gradients stay in order, in the second hooks are seen; with the third it is known what waits."""

NO_UPDATES_IN_GRAPHS = "a CUDA graph has no updates, whose hyper-parameters may change between steps"

Threads = tuple[Annotated[int, AtLeast(1)], Annotated[int, AtLeast(1)]]


@dataclass(frozen=True)
class TwoStreamReport(Report):
    """Report of what ran where.

    Args:
        layers: whose weight gradients can run on the sub-stream.
        in_order: numbers of other layers, by reason.
        setting: of the steps from now on; None: the search has not ended.
        tried_ms: the median step of each setting that was tried.
        sub_stream: weight gradients, one a call of a layer, that ran on the sub-stream.
        main_stream: that were to, and ran on the main stream when it had nothing else to do.
        held_bytes: at most, of inputs and output gradients whose weight gradients waited.
        graph: of the CUDA graphs; None: none were asked for.
        updates: of parameters, that ran right behind their weight gradient.
        fusion: the report of the optimizer's backward fusion, which counts these too; None: it steps by itself.
    """

    layers: int
    in_order: Mapping[str, int]
    setting: Setting | None
    tried_ms: Mapping[Setting, float]
    sub_stream: int
    main_stream: int
    held_bytes: int
    graph: GraphReport | None = None
    updates: int = 0
    fusion: FusionReport | None = None

    def what_was_done(self) -> list[str]:
        mine = [
            f"two streams: {self.sub_stream} weight gradients of {self.layers} layers ran on the sub-stream, "
            f"{self.main_stream} on the main stream after its own work",
            f"setting: {self.setting or 'still searching'}",
        ]
        fused = [] if self.fusion is None else [f"{self.updates} updates right after their weight gradients"]
        return mine + fused + [text for part in self._parts for text in part.what_was_done()]

    def what_stayed_plain(self) -> list[str]:
        one = self.setting is not None and not self.setting.two_streams and not self.tried_ms
        alone = ["all layers: kernels have one thread, so there is no core for a second stream"] if one else []
        in_order = each_because(self.in_order, "layers in order")
        return alone + in_order + [text for part in self._parts for text in part.what_stayed_plain()]

    def what_was_measured(self) -> list[str]:
        tried = ", ".join(f"{setting}: {ms:.1f} ms" for setting, ms in self.tried_ms.items())
        waited = f"at most {show_bytes(self.held_bytes)} of tensors were kept for weight gradients that waited"
        rest = [text for part in self._parts for text in part.what_was_measured()]
        return [f"steps of the search: {tried}"] * bool(tried) + [waited] + rest

    def what_to_try(self) -> list[str]:
        off = bool(self.tried_ms) and self.setting is not None and not self.setting.two_streams
        fused = ["fuse_updates=True (bare loops: optimizer=): updates run beside the backward pass too"]
        return super().what_to_try() + fused * (off and self.fusion is None and self.graph is None)

    @property
    def _parts(self) -> list[Report]:
        return [part for part in (self.fusion, self.graph) if part is not None]


@dataclass(eq=False)
class _Waiting:
    """A weight gradient that was given away, and what its parameters had then."""

    layer: SplitLayer
    parameters: Parameters
    job: Job
    before: list[tuple[nn.Parameter, Tensor | None, int]]
    fusion: SubStreamFusion | None = None
    updates: list[FusedParameter] = field(default_factory=list)
    """That the job makes behind the gradients."""


class TwoStreamBackward:
    """Runs the weight gradients of linear layers and convolutions beside the output gradients of the layers below.

    In a bare loop on one device::

        two_streams = TwoStreamBackward(model)
        for x, y in loader:
            criterion(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        print(two_streams.report())
        two_streams.remove()

    On CUDA the other stream has the lowest priority. On a CPU it is a second thread with some of the cores.
    Gradients equal, bit for bit, those of a plain backward pass whose kernels have as many threads, which decides how
    sums are rounded on a CPU. The search tries several numbers; ``threads=(n, n)`` with
    ``n = torch.get_num_threads()`` keeps the plain one.

    Layers that stay in order are listed in the report: other kinds of layers, layers whose parameters have
    hooks or are used in several places, code under activation checkpointing, ``torch.compile`` or function transforms,
    and backward passes for chosen inputs or with ``create_graph=True``.

    With ``graph=True`` parts of the model are captured as CUDA graphs with both streams inside, so that the host does
    not issue their kernels one by one (section 4.2). Only modules whose code is certain to run the same kernels in
    each call are captured, and gradients do not change: :mod:`retime.mechanisms.two_streams.graph`.
    With ``optimizer=`` each update runs right after its weight gradient, on the same stream; parameters of layers that
    stay in order update as in backward fusion (:func:`retime.mechanisms.fusion.fuse_optimizer`). ``optimizer.step()``
    does the rest, and gradients are freed in ``backward()``. If steps have different numbers of backward passes, wrap
    all but the last in ``with two_streams.fusion.accumulate():``.

    Args:
        model: any module on one device; not wrapped in DistributedDataParallel.
        optimizer: of its parameters, to run updates inside the backward pass; None: updates stay in ``step()``.
        threads: of each kernel on the main stream and on the sub-stream, on a CPU, without a search; None:
            a search of at most 38 training steps chooses, and removes two streams if they are not faster. On a CPU 16
            steps, 100 later, compare them with the plain step again, and remove them if they are slower then.
        max_memory: bytes of inputs and output gradients that may wait for their weight gradients; beyond it the main
            stream computes the one that has waited longest (on CUDA it waits). None: no bound.
        layers: names of layers whose weight gradients may run on the sub-stream, as in ``report().setting.layers`` of
            an earlier run; None: all, or with a search on a CPU those that its profile chooses.
        graph: capture parts of the model as CUDA graphs; a search tries this with one stream and two.

    Raises:
        ValueError: an argument out of range, ``layers`` names a layer that cannot, the model runs on several ranks, the
            optimizer cannot be updated parameter by parameter, or ``graph=True`` without a CUDA device or with
            ``optimizer=``.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: Optimizer | None = None,
        threads: Threads | None = None,
        max_memory: int | str | None = None,
        layers: Collection[str] | None = None,
        graph: bool = False,
    ) -> None:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "two streams are for one device: under DistributedDataParallel use OutOfOrderDataParallel, whose "
                "weight gradients wait for the network"
            )
        if graph:
            devices = {parameter.device for parameter in model.parameters()}
            if not all(map(has_streams, devices)):
                raise ValueError(
                    "graph=True captures CUDA graphs, and the model is on "
                    f"{', '.join(sorted(map(str, devices)))}: move it to a CUDA device before, or use graph=False"
                )
            if optimizer is not None:
                raise ValueError(f"{NO_UPDATES_IN_GRAPHS}: leave one of optimizer= and graph=True out")
        if optimizer is not None:
            check_can_fuse_in_backward(model, optimizer)
        self._most_bytes = None if max_memory is None else parse_bytes("max_memory", max_memory)
        self._given = threads
        self._threads_before = torch.get_num_threads()
        self._layers, self._others = split_layers(model, self._take)
        self._chosen = None if layers is None else _chosen(layers, self._layers)
        self._hooked: dict[SplitLayer, str] = {}
        self._sub: SubStream | None = None
        self._profile: Profile | RegionProfile | None = None
        self._to_try: list[Setting] = []
        self._search: Search | None = None
        self._second_look: dict[int, Search] = {}
        """By the step that it begins with."""
        self._setting: Setting | None = None
        self._now: Setting | None = None
        """The setting of the step that is under way."""
        self._tried_ms: dict[Setting, float] = {}
        self._first: SplitLayer | None = None
        self._steps = 0
        self._has_warned = False
        self._waiting: dict[int, list[_Waiting]] = {}
        """By autograd's number of the backward pass."""
        self._counts = Counter[bool]()
        self._held_bytes = 0
        self._updates = 0
        self._fusions: list[SubStreamFusion] = []
        for layer in self._layers:
            layer.is_on = False
            layer.on_call = self._on_call
            layer.module.forward = layer
        self._has_graph, self._parts, self._outside = graph, list[GraphedPart](), Counter[str]()
        if graph:
            self._parts, self._outside = parts_of(model, self._layers, self._on_part_call, self._counts)
            for part in self._parts:
                part.module.forward = part
            if not self._parts:
                warn_no_effect(f"graph=True has no effect: {format_counts(self._outside, 'layers in no graph')}")
        self.fusion: BackwardFusion | None = None
        """Of ``optimizer``, if it was given."""
        if optimizer is not None:
            self.fusion = self.fuse(optimizer)
            self.fusion.complete_in_step()
        self._see_effect()

    def fuse(self, optimizer: Optimizer, **options: Any) -> BackwardFusion:
        """Return a backward fusion of this optimizer, of which updates run behind weight gradients on the sub-stream.

        Args:
            options: of :class:`retime.mechanisms.fusion.BackwardFusion`.
        """
        fusion = SubStreamFusion(optimizer, self, **options)
        self._fusions.append(fusion)
        self._put_output_first()
        return fusion

    def leave(self, fusion: SubStreamFusion) -> None:
        """Called by a fusion that is taken off."""
        if fusion in self._fusions:
            self._fusions.remove(fusion)
        self._put_output_first()

    def _put_output_first(self) -> None:
        for layer in self._layers:
            layer.output_first = bool(self._fusions)

    def forget_calls(self) -> None:
        """A step has ended, or failed: no weight is kept for a backward pass."""
        for layer in self._layers:
            layer.forget_calls()

    def report(self) -> TwoStreamReport:
        """Return what ran where so far."""
        layers, in_order = self._where()
        return TwoStreamReport(
            layers,
            in_order,
            self._setting,
            self._tried_ms,
            self._counts[True],
            self._counts[False],
            self._held_bytes,
            report_of(self._parts, self._outside) if self._has_graph else None,
            self._updates,
            None if self.fusion is None else self.fusion.report(),
        )

    def _where(self) -> tuple[int, dict[str, int]]:
        """Return how many layers' weight gradients can run elsewhere, and how many stay in order, by reason."""
        in_order, can = self._others.copy(), 0
        for layer in self._layers:
            if layer.why_in_order is not None or layer in self._hooked:
                in_order[layer.why_in_order or self._hooked[layer]] += 1
            elif layer.module.weight.requires_grad:
                if layer.is_new and self._steps > 1:
                    in_order[NOT_SPLIT] += 1
                else:
                    can += 1
        return can, dict(in_order)

    def _see_effect(self) -> None:
        can, in_order = self._where()
        if not can and not self._has_warned:
            self._has_warned = True
            warn_no_effect(f"two streams have no effect: {format_counts(in_order, 'in order') or 'nothing is trained'}")

    def remove(self) -> None:
        """Give the layers their own ``forward`` back, end the thread, and set the number of threads back."""
        self._take_off()
        if self.fusion is not None:
            self.fusion.remove()
        self._waiting.clear()

    def _take_off(self) -> None:
        for part in self._parts:
            part.two_streams = None
            part.keep_only(None)
            if vars(part.module).get("forward") is part:
                del part.module.forward
        for layer in self._layers:
            layer.take = None
            layer.look_no_more()
            if vars(layer.module).get("forward") is layer:
                del layer.module.forward
        if self._sub is not None:
            self._sub.close()
            self._sub = None
        self._set_threads(self._threads_before)

    def _on_call(self, layer: SplitLayer) -> None:
        """A layer is called in a forward pass; with the one that is called first, a step begins."""
        is_in_part = any(part.is_running and layer in part.layers for part in self._parts)
        if self._first is None or (layer is self._first and not is_in_part):
            self._begin_step(layer)

    def _on_part_call(self, part: GraphedPart) -> None:
        """A part is called, and its layers are not where a graph is replayed."""
        first = self._first
        if first is not None and [one for one in self._parts if one.is_running and first in one.layers] == [part]:
            self._begin_step(first)

    def _begin_step(self, layer: SplitLayer) -> None:
        self._steps += 1
        if self._first is None:
            self._first = layer
            self._begin(layer.module.weight.device)
        elif self._profile is not None and self._profile.next_step():
            self._use(self._profile.setting(self._to_try[-1]))
        elif self._to_try:
            if self._profile is not None:
                self._to_try, self._profile = self._profile.end(self._to_try), None
            self._search, self._to_try = Search(self._to_try, self._device), []
            self._next_setting(self._search)
        elif self._search is not None:
            self._next_setting(self._search)
        elif self._steps in self._second_look:
            self._search = self._second_look.pop(self._steps)
            self._next_setting(self._search)
        if self._steps == STEPS_TO_SEE:
            self._see_effect()
            if self._parts and not any(part.was_called for part in self._parts):
                names = ", ".join(repr(part.name or "the model") for part in self._parts)
                warn_no_effect(f"graph=True has no effect: no module that may be captured is called ({names})")
        self.end_jobs()

    def _begin(self, device: torch.device) -> None:
        """The first step: gradients of all layers stay in order, and show which have several uses."""
        self._device = device
        threads = torch.get_num_threads()
        if self._given is not None or torch.are_deterministic_algorithms_enabled():
            main, sub = self._given or (threads, threads)
            self._setting = Setting(True, graph=bool(self._parts), layers=self._chosen)
            if not has_streams(device):
                self._setting = Setting(True, main, main, sub, layers=self._chosen)
            self._use(self._setting)
            return
        settings = settings_for(device, threads, graph=bool(self._parts))
        if len(settings) == 1:
            warn_no_effect("two streams have no effect: kernels have one thread, so there is no core for a second one")
            self._setting = settings[0]
            self._take_off()
            return
        if not has_streams(device):
            warn_difference(
                f"the search of two streams also runs kernels with fewer than {threads} threads, whose sums round "
                f"differently in the last bits: threads=({threads}, {threads}) keeps them"
            )
        if self._chosen is None and not self._fusions and not self._parts:
            self._profile = RegionProfile(device, self._most_bytes) if has_streams(device) else Profile(self._layers)
        self._to_try = with_layers(settings, self._chosen)
        self._use(Setting(True, threads, threads, threads))

    def _next_setting(self, search: Search) -> None:
        setting = search.next_step()
        if setting is None:
            self._end_search(search)
        else:
            self._use(setting)

    def _end_search(self, search: Search) -> None:
        self._search, self._tried_ms = None, {**self._tried_ms, **search.medians_ms()}
        is_second_look = self._setting is not None
        self._setting = search.second_look() if is_second_look else search.best()
        if self._setting.two_streams and not is_second_look and not has_streams(self._device):
            two = [search.best_plain(), self._setting]
            self._second_look = {self._steps + STEPS_TO_SECOND_LOOK: Search(two, self._device)}
        self._use(self._setting)
        for part in self._parts:
            part.keep_only(part.two_streams)
        if self._setting.two_streams:
            self._see_effect()
        elif not self._setting.graph:
            tried = ", ".join(f"{setting}: {ms:.1f} ms" for setting, ms in self._tried_ms.items())
            warn_no_effect(f"two streams do not pay here and are taken off: {self._setting} is as fast ({tried})")
            fewer = self._setting.forward_threads
            self._take_off()
            self._set_threads(fewer)

    def _use(self, setting: Setting) -> None:
        if setting == self._now:
            return  # a thread that starts in each step would be part of what the search measures
        self._now = setting
        for layer in self._layers:
            layer.is_on = setting.two_streams and (setting.layers is None or layer.name in setting.layers)
        for part in self._parts:
            part.two_streams = setting.two_streams if setting.graph else None
        if self._sub is not None:
            self._sub.close()
            self._sub = None
        if setting.two_streams:
            self._sub = sub_stream_of(self._device, setting.sub_threads, setting.places)
        self._set_threads(setting.forward_threads)

    def _set_threads(self, threads: int) -> None:
        if threads and threads != torch.get_num_threads():
            torch.set_num_threads(threads)

    def _take(
        self,
        layer: SplitLayer,
        parameters: Parameters,
        compute: Callable[[], tuple[Tensor | None, Tensor | None]],
        size_bytes: int,
    ) -> bool:
        """In the backward pass: give a weight gradient to the sub-stream, unless it has to stay in order."""
        if layer.why_in_order is not None or (dispatch_mode_count() and not has_streams(self._device)):
            return False
        hooks = layer.hooks(parameters)
        if hooks is not None:
            self._hooked[layer] = hooks
            return False
        self._hooked.pop(layer, None)
        if layer.is_new:
            return False
        sub, now = self._sub, self._now
        if sub is None or now is None:
            return False
        waiting = self.begin_pass()
        self._set_threads(now.main_threads)
        job = Job(compute, size_bytes, layer.name)
        if self._profile is not None and not self._profile.want(layer, job):
            return False
        before = [(p, p.grad, -1 if p.grad is None else version_of(p.grad)) for p in parameters if p is not None]
        one = _Waiting(layer, parameters, job, before)
        self._put_updates_behind(one, compute)
        waiting.append(one)
        sub.give(one.job)
        while self._most_bytes is not None and sub.held_bytes > self._most_bytes and sub.run_oldest():
            pass
        self._held_bytes = max(self._held_bytes, sub.held_bytes)
        return True

    def begin_pass(self) -> list[_Waiting]:
        """Return what waits in the backward pass that is under way, of whose end or failure this hears from now on."""
        backward = graph_task_id()
        if backward not in self._waiting:
            self._waiting[backward] = []
            only_updates = partial(self._waiting.pop, backward, None)
            finish = only_updates if self._sub is None else partial(self._finish, backward)
            queue_callback(_End(finish, partial(self._fail, backward)))
            if self._profile is not None:
                self._profile.begin_backward()
        return self._waiting[backward]

    def _put_updates_behind(self, one: _Waiting, compute: Callable[[], tuple[Tensor | None, Tensor | None]]) -> None:
        for fusion in self._fusions:
            updates = fusion.take(one.parameters, update=one.fusion is None and one.layer.has_one_call())
            if updates:
                one.fusion, one.updates = fusion, updates
                one.job.compute = partial(fusion.compute, compute, one.parameters, updates)

    def _finish(self, backward: int) -> None:
        """The backward pass is at its end: wait for its weight gradients, and give them to their parameters."""
        waiting = self._waiting.pop(backward, [])
        sub, now = self._sub, self._now
        assert sub is not None
        assert now is not None
        if self._profile is not None:
            self._profile.end_backward()
        try:
            sub.join()
        except BaseException:
            sub.drop()
            self._abandon_updates()
            raise
        finally:
            self._set_threads(now.forward_threads)
        for one in waiting:
            if one.job.error is not None:
                self._abandon_updates()
                updated = ", or its parameters were updated" if one.updates else ""
                one.job.error.add_note(f"retime: while the weight gradient of {one.layer.name!r} was computed{updated}")
                raise one.job.error
        self._counts.update(one.job.on_sub_stream for one in waiting)
        for one in waiting:
            if one.fusion is not None:
                self._updates += len(one.updates)
                one.fusion.note(one.updates)
        with torch.no_grad():
            self._hand_on(waiting)

    def _fail(self, backward: int) -> None:
        """The backward pass has failed, and its exception is on its way: nothing of it runs on behind that."""
        if self._waiting.keys() - {backward}:  # it was one inside of another, which may go on
            self._waiting.pop(backward, None)
        else:
            self.end_jobs()

    def _hand_on(self, waiting: list[_Waiting]) -> None:
        totals: dict[nn.Parameter, Tensor] = {}
        for one in waiting:
            for parameter, gradient in zip(one.parameters, one.job.gradients, strict=True):
                # calls of one layer are added up before .grad, as autograd does
                if parameter is not None and gradient is not None:
                    totals[parameter] = totals[parameter] + gradient if parameter in totals else gradient
            one.job.gradients = ()
        for one in waiting:
            for parameter, gradient_before, version in one.before:
                if parameter not in totals:
                    continue
                gradient = totals.pop(parameter)
                there = parameter.grad
                if there is not gradient_before or (there is not None and version_of(there) != version):
                    self._found_other_use(one.layer)
                add_gradient(parameter, gradient)
                for fusion in self._fusions:  # autograd would have told them
                    fusion.gradient_came(parameter)

    def _found_other_use(self, layer: SplitLayer) -> None:
        if layer.why_in_order is None:
            layer.why_in_order = SEVERAL_USES
            warn_difference(
                f"{layer.name!r} stays in order from now on: {SEVERAL_USES}. They did not in the first step, so "
                "they may round differently in this one"
            )

    def end_jobs(self) -> None:
        """Drop what a backward pass left behind that failed, and wait for what is under way."""
        if not self._waiting:
            return
        self._waiting.clear()
        try:
            if self._sub is not None:
                self._sub.drop()
        finally:  # Ctrl-C may end the wait
            if self._sub is not None and self._now is not None:
                self._set_threads(self._now.forward_threads)
            self._abandon_updates()

    def _abandon_updates(self) -> None:
        for fusion in () if self._waiting else self._fusions:  # a pass around the one that failed may go on
            fusion.abandon_step()


class _End:
    """Autograd's callback at the end of a backward pass, which it drops uncalled where the pass has failed.

    Args:
        finish: called at the end.
        fail: called in its place, before the exception leaves ``backward()``.
    """

    def __init__(self, finish: Callable[[], object], fail: Callable[[], None]) -> None:
        self._finish = finish
        self._fail: Callable[[], None] | None = fail

    def __call__(self) -> None:
        self._fail = None
        self._finish()

    def __del__(self) -> None:
        if self._fail is not None:
            self._fail()


def _chosen(names: Collection[str], layers: list[SplitLayer]) -> frozenset[str]:
    chosen, there = frozenset(names), {layer.name for layer in layers}
    if not chosen or chosen - there:
        wrong = f"names {', '.join(map(repr, sorted(chosen - there)))}" if chosen else "names none"
        raise ValueError(f"layers {wrong}: weight gradients that can run on the sub-stream have {sorted(there)}")
    return chosen
