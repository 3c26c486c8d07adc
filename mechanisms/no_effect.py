"""The warning every mechanism raises when it was asked for but cannot help."""


class NoEffectWarning(UserWarning):
    """A step runs the plain way: the text says why, and what to change so that the mechanism applies."""
