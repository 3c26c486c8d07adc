"""Steps that read values, which fake tensors do not have."""


class ValueReadError(RuntimeError):
    """A step reads a tensor's value, or makes a tensor whose size depends on one: fake tensors have no values."""
