"""The layers whose weight gradients can wait, and the blocks that k counts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor, nn

from retime.foundations.lazy_updates import is_compiled
from retime.foundations.torch_private import has_backward_hooks, tensor_hooks

SMALL_BYTES = 64 * 1024
"""Weight gradients up to this size are computed in order and handed on later: a pass of their own over the activations
(as for a normalisation layer) would cost more than keeping them."""
COMPILED = "it is compiled or scripted"
_LEAST_REPEATS = 3
_LEAST_SHARE = 0.5
"""A class counts as the model's repeated block if its instances hold this share of the parameters' bytes."""


@dataclass(eq=False)
class Layer:
    """A module with trainable parameters of its own; its children's parameters are part of it."""

    name: str
    module: nn.Module
    parameters: list[Tensor]
    """All of them; layers are frozen and thawed while training goes on."""
    why_in_order: str | None = None
    """Why its weight gradient stays in the conventional order; None: it can wait."""
    why_buffered: str | None = None
    """Why its weight gradient is computed in the conventional order, although it is handed on later; None: it is
    computed later."""

    def trainable(self) -> list[Tensor]:
        """Those of its parameters that are not frozen now."""
        return [p for p in self.parameters if p.requires_grad]

    @property
    def size_bytes(self) -> int:
        """Of the weight gradients."""
        return sum(p.numel() * p.element_size() for p in self.trainable())


@dataclass(eq=False)
class Block:
    """Layers that are deferred together, in forward order."""

    name: str
    layers: list[Layer] = field(default_factory=list)


def find_layers(model: nn.Module) -> list[Layer]:
    """Every layer of ``model`` in order of registration; those that can be ruled out by looking at them are marked."""
    owners: Counter[Tensor] = Counter()
    for module in model.modules():
        owners.update(p for p in module.parameters(recurse=False))
    layers: list[Layer] = []
    inside: set[nn.Module] = set()
    compiled: set[nn.Module] = set()
    for name, module in model.named_modules():
        if is_compiled(module):
            compiled.update(module.modules())
        if module in inside or not _is_layer(module):
            continue
        inside.update(module.modules())
        parameters: list[Tensor] = list(module.parameters())
        if not any(p.requires_grad for p in parameters):
            continue
        layer = Layer(name, module, parameters)
        if module in compiled:
            layer.why_in_order = COMPILED
        elif isinstance(module, nn.RNNBase):
            layer.why_in_order = "its kernel computes all gradients at once, from a list of weights of its own"
        elif any(owners[p] > 1 for p in parameters):
            layer.why_in_order = "its parameters are tied to another module's"
        elif any(has_backward_hooks(m) for m in module.modules()):
            layer.why_in_order = "it has backward hooks"
        elif any(tensor_hooks(p) for p in parameters):
            layer.why_in_order = "its parameters have gradient hooks"
        layers.append(layer)
    return layers


def _is_layer(module: nn.Module) -> bool:
    """Parameters of a module that mostly contains others (a class token, say) do not make it one layer."""
    own = sum(p.numel() for p in module.parameters(recurse=False))
    return own > 0 and 2 * own >= sum(p.numel() for p in module.parameters())


def group_into_blocks(model: nn.Module, layers: list[Layer], names: Iterable[str] | None = None) -> list[Block]:
    """Group layers, given in forward order, into blocks: the named modules, else repeated ones, else single layers.

    Layers outside these modules are blocks of their own; a small one (a normalisation, say) joins the block before it.

    Raises:
        ValueError: a name is not a module of the model, or holds no layer.
    """
    owner = _owners(model, layers, names)
    blocks: list[Block] = []
    by_owner: dict[str, Block] = {}
    for layer in layers:
        top = owner.get(layer)
        if top is not None:
            if top not in by_owner:
                by_owner[top] = Block(top)
                blocks.append(by_owner[top])
            by_owner[top].layers.append(layer)
        elif blocks and layer.size_bytes <= SMALL_BYTES:
            blocks[-1].layers.append(layer)
        else:
            blocks.append(Block(layer.name, [layer]))
    return blocks


def _owners(model: nn.Module, layers: list[Layer], names: Iterable[str] | None) -> dict[Layer, str]:
    if names is not None:
        modules = dict(model.named_modules())
        chosen = list(names)
        for name in chosen:
            if name not in modules:
                raise ValueError(
                    f"blocks: {name!r} is not a module of the model: choose names of model.named_modules()"
                )
            if not any(_is_under(layer.name, name) for layer in layers):
                raise ValueError(f"blocks: {name!r} holds no layer with trainable parameters that the model used")
    else:
        chosen = _repeated(model, layers)
    return {layer: name for layer in layers for name in chosen if _is_under(layer.name, name)}


def _repeated(model: nn.Module, layers: list[Layer]) -> list[str]:
    """Names of the instances of the finest repeated class that holds most of the parameters."""
    total = sum(layer.size_bytes for layer in layers)
    single = {layer.name for layer in layers}
    instances: dict[type[nn.Module], list[str]] = {}
    for name, module in model.named_modules():
        if name and name not in single and not isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            instances.setdefault(type(module), []).append(name)
    best: list[str] = []
    for names in instances.values():
        held = sum(layer.size_bytes for layer in layers if any(_is_under(layer.name, name) for name in names))
        if len(names) >= _LEAST_REPEATS and held >= _LEAST_SHARE * total and len(names) > len(best):
            best = names
    return best


def _is_under(layer: str, module: str) -> bool:
    return layer == module or layer.startswith(f"{module}.")
