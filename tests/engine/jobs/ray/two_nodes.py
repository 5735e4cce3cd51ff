"""Run a Ray cluster of two nodes with a CPU each on this machine, until standard input ends; prints its address."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    print(cluster.address, flush=True)
    sys.stdin.read()
