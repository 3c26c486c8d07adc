"""What out-of-order backprop really did."""

from dataclasses import dataclass, field

from retime.foundations.reasons import because


@dataclass
class OutOfOrderReport:
    """Counts since the mechanism was attached; sizes in bytes, times in seconds."""

    blocks: int = 0
    """L, the blocks found in forward order; 0 before the first backward pass has been watched."""
    k: int = 0
    """Blocks whose weight gradients run last, in forward order (Oh et al. 2022, algorithm 2)."""
    bucket_bytes: int = 0
    """Up to which size gradients are sent together (``bucket_cap_mb``)."""
    steps: int = 0
    """Backward passes with gradient synchronisation."""
    deferred_gradients: int = 0
    """Weight gradients (one a layer and step) that were computed after all output gradients."""
    buffered_gradients: int = 0
    """Weight gradients that one kernel computes together with the output gradient, and that were handed on later."""
    layers_in_order: dict[str, int] = field(default_factory=dict)
    """Layers that stay in the conventional order, by reason."""
    buffered_layers: dict[str, int] = field(default_factory=dict)
    """Layers whose weight gradients are computed in order and handed on later, by reason."""
    fused_updates: int = 0
    """Parameter updates that waited for their own gradients only, in the next forward pass or at another read."""
    late_updates: int = 0
    """Parameter updates that ran in ``optimizer.step()`` all the same."""
    early_waits: int = 0
    """Steps in which something read a gradient between backward and ``optimizer.step()``, and so waited for it."""
    plain_steps: dict[str, int] = field(default_factory=dict)
    """Steps or optimizers without cross-iteration wait, by reason."""
    in_order: dict[str, int] = field(default_factory=dict)
    """Backward passes whose weight gradients all ran in the conventional order, by reason."""
    searched: dict[int, float] = field(default_factory=dict)
    """With ``k="auto"``: seconds a step by k, in the order in which they were measured."""
    search_steps: int = 0
    """Steps from the first one until the search had ended, or until now."""
    extra_bytes: int = 0
    """Predicted growth of the memory peak at this k (algorithm 2, line 1)."""

    def __str__(self) -> str:
        text = (
            f"out-of-order backprop: k={self.k} of {self.blocks} blocks, {self.deferred_gradients} weight gradients "
            f"deferred and {self.buffered_gradients} buffered over {self.steps} steps; {self.fused_updates} updates "
            f"waited for their own gradients only, {self.late_updates} ran in optimizer.step(); buckets of "
            f"{self.bucket_bytes / 2**20:g} MiB"
        )
        if self.early_waits:
            text += f"; {self.early_waits} steps waited because gradients were read before optimizer.step()"
        for title, counts, what in (
            ("in order", self.layers_in_order, "layers"),
            ("buffered gradients", self.buffered_layers, "layers"),
            ("no cross-iteration wait", self.plain_steps, "steps"),
            ("weight gradients in order", self.in_order, "backward passes"),
        ):
            if counts:
                text += f"; {title}: {because(counts, what)}"
        return text
