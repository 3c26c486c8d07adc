"""What is said where a model cannot be spread over ranks, or a rank is gone."""

__all__ = ["PipelineError", "RankLostError"]


class PipelineError(ValueError):
    """The model or the batch cannot go through a pipeline; the message says what to change."""


class RankLostError(RuntimeError):
    """A message of another rank did not come."""
