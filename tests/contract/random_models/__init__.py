"""Random small models trained by every mechanism and by plain torch: what no hand-written scenario thought of.

A seed gives a :class:`~contract.random_models.spec.Spec`, which is data: it prints, and the minimiser drops its parts.

    python -m contract.random_models --drivers bare_backward,lightning_forward --start 0 --count 1000     # in tests/
"""
