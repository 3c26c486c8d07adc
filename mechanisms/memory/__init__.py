"""Training inside a byte budget: profile, offload, sub-batches (Chen et al. 2018, moDNN)."""
