"""A process that opens a network, starts a rank that sleeps, and is then killed by recipes/emulated/test_cluster.py."""

import os
import signal

from retime.recipes.emulated import emulated_network, run_ranks
from support.emulated_plain_worker import serve

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
with emulated_network(hosts=1, bits_per_second=1e9) as network:
    run_ranks(network, serve, {"do": "sleep"}, progress=lambda text: print(os.getpid(), network.prefix, flush=True))
