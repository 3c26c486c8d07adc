"""An emulated cluster: real gloo over real sockets between network namespaces whose links have a chosen rate.

    with emulated_network(hosts=2, bits_per_second=parse_rate("2gbit")) as network:
        answers = run_ranks(network, serve, request)

It needs root, `ip` and `tc`; `unavailable()` says what is missing. `loopback(hosts)` is the same without namespaces and
without a rate, for anybody.
"""

from retime.recipes.emulated.network import ClusterUnavailable, Network, emulated_network, loopback, unavailable
from retime.recipes.emulated.ranks import RankError, run_ranks
from retime.recipes.emulated.sleeping import SleepingLayer, sleeping_copy
from retime.schedules.network import parse_rate, rate_text
