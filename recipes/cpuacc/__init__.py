"""Gradient accumulation on the host's processors (Sekiyama et al. 2017)."""
