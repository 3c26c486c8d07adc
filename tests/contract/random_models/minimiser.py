"""The smallest spec that still fails: parts are left out, one at a time, as long as the failure stays."""

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from contract.random_models.spec import Node, Spec, Training


def minimise(spec: Spec, fails: Callable[[Spec], bool], tries: int = 400) -> Spec:
    """A spec of which no single part can be left out without `fails` becoming false."""
    smaller = True
    while smaller and tries > 0:
        smaller = False
        for candidate in _smaller(spec):
            tries -= 1
            if tries < 0:
                break
            if fails(candidate):
                spec, smaller = candidate, True
                break
    return spec


def _smaller(spec: Spec) -> Iterator[Spec]:
    for index in range(len(spec.nodes)):
        yield replace(spec, nodes=_without(spec.nodes, index))
    for index, node in enumerate(spec.nodes):
        for simpler in _simpler(node, index):
            yield replace(spec, nodes=(*spec.nodes[:index], simpler, *spec.nodes[index + 1 :]))
    yield from (replace(spec, training=one) for one in _plainer(spec.training))
    if spec.batch > 2:
        yield replace(spec, batch=spec.batch - 1)
    if spec.time > 1:
        yield replace(spec, time=spec.time - 1)
    if spec.features > 4:
        yield replace(spec, features=4)


def _without(nodes: tuple[Node, ...], gone: int) -> tuple[Node, ...]:
    """The other nodes; those that read the missing one read what it read."""
    left = []
    for index, node in enumerate(nodes):
        if index == gone:
            continue
        if index > gone:
            of = tuple(_shorter(index, back, gone, nodes[gone]) for back in node.of)
            like = 0 if index - node.like == gone else node.like - (node.like > index - gone)
            node = replace(node, of=of, like=max(0, like))
        left.append(node)
    return tuple(left)


def _shorter(index: int, back: int, gone: int, missing: Node) -> int:
    read = index - back
    if read == gone:
        read = gone - missing.of[0]
    elif read > gone:
        return back
    return max(1, index - 1 - max(read, -1))


def _simpler(node: Node, index: int) -> Iterator[Node]:
    if node.inner:
        if len(node.inner) == 1:
            yield replace(node.inner[0], of=node.of[:1])
        for gone in range(len(node.inner)):
            if len(node.inner) > 1:
                yield replace(node, inner=node.inner[:gone] + node.inner[gone + 1 :])
        for place, one in enumerate(node.inner):
            for simpler in _simpler(one, place):
                yield replace(node, inner=(*node.inner[:place], simpler, *node.inner[place + 1 :]))
    for name in ("frozen", "unused"):
        if getattr(node, name):
            yield replace(node, **{name: False})
    if node.like:
        yield replace(node, like=0)
    if any(back > 1 for back in node.of):
        yield replace(node, of=(1,) * len(node.of))
    for name in node.options:
        yield replace(node, options={key: value for key, value in node.options.items() if key != name})


def _plainer(training: Training) -> Iterator[Training]:
    for gone in range(len(training.between)):
        yield replace(training, between=training.between[:gone] + training.between[gone + 1 :])
    for one in fields(training):
        default: Any = one.default if one.default is not MISSING else one.default_factory()  # type: ignore[misc]
        if one.name == "options":
            for name in training.options:
                if name != "lr":
                    yield replace(training, options={k: v for k, v in training.options.items() if k != name})
        elif one.name == "optimizer":
            if training.optimizer != default:
                yield replace(training, optimizer=default, options={"lr": 0.05})
        elif one.name == "steps":
            for fewer in range(1, training.steps):
                yield replace(training, steps=fewer, between=tuple(b for b in training.between if b[0] < fewer - 1))
        elif one.name != "between" and getattr(training, one.name) != default:
            yield replace(training, **{one.name: default})
