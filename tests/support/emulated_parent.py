"""A process that opens a network, starts ranks that sleep, and is then killed by recipes/emulated/test_cluster.py."""

from retime.recipes.emulated import emulated_network, run_ranks
from support.emulated_plain_worker import serve

with emulated_network(hosts=2, bits_per_second=1e9) as network:
    run_ranks(
        network,
        serve,
        {"do": "sleep"},
        progress=lambda text: print(network.prefix, flush=True),
    )
