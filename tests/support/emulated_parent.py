"""A process that opens a network, starts ranks that sleep, and is then killed by recipes/emulated/test_cluster.py."""

from retime.recipes.emulated import emulated_network, run_ranks

with emulated_network(hosts=2, bits_per_second=1e9) as network:
    run_ranks(
        network,
        "support.emulated_plain_worker",
        {"do": "sleep"},
        progress=lambda text: print(network.prefix, flush=True),
    )
