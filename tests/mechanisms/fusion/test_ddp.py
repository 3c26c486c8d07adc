"""Fusion under bare DistributedDataParallel: accumulation, unused layers, bucket views, static graphs, guards."""

from support.two_ranks import run_two_ranks


def test_two_ranks_keep_the_bits_of_plain_ddp() -> None:
    for number, rank in enumerate(run_two_ranks("fusion_ddp_worker.py")):
        assert f"rank {number}: same bits" in rank.stdout, rank.stderr
