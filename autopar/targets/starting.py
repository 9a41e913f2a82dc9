"""The scripts in an exported folder that start the job, for torchrun and for Slurm."""

from __future__ import annotations

from autopar.launching import scripts
from autopar.launching.job import launch_of, machines_named
from autopar.plans.clusters import get_cluster
from autopar.targets import target_named
from autopar.targets.host_shares import shares_of
from autopar.targets.target import Export, WrittenFiles

TORCHRUN, SLURM = "launch.sh", "launch.slurm"


def launchers(export: Export, written: WrittenFiles) -> dict[str, str]:
    """Return the texts of ``launch.sh`` and ``launch.slurm``, which are started in the folder."""
    target = target_named(export.priced.plan.pins.target)
    cluster, devices = machines_named(export.cluster_name, get_cluster)
    used = devices[: export.priced.plan.n_devices]
    on_host = shares_of(export.priced).steps > 0
    job = launch_of(cluster, written.argv, target.environment, devices=used, steps_on_host=on_host)
    return {TORCHRUN: scripts.torchrun(job, TORCHRUN), SLURM: scripts.slurm(job, target.name)}
