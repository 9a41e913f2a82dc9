"""Clusters by name or file, and the names by which plans remember them."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import ClusterError
from hardware_profiles import Cluster, ProfileError, load_cluster

FILES = (".toml", ".json")


def get_cluster(cluster: str | Path | Cluster) -> Cluster:
    """A cluster by name, by file, or as it is.

    Raises:
        ClusterError: there is none of that name, or the file is malformed or cannot be read. ``hardware_profiles``
            stands alone and raises its own error, which is no :class:`~autopar.errors.AutoparError`.
    """
    if isinstance(cluster, Cluster):
        return cluster
    try:
        return load_cluster(cluster)
    except ProfileError as error:
        raise ClusterError(str(error)) from error
    except OSError as error:
        raise ClusterError(f"cannot read cluster file {cluster}: {error.strerror}") from error


def reference(cluster: str | Path | Cluster) -> str:
    """What a plan keeps to find the cluster again: its name, or the absolute path of its file.

    Plan files turn the path into one relative to themselves when they are saved.
    """
    if isinstance(cluster, Cluster):
        return cluster.name
    return Path(cluster).resolve().as_posix() if str(cluster).endswith(FILES) else str(cluster)


def profile_of(profile: str | Path, cluster: str | Path | Cluster | None = None) -> str:
    """The path of a profile file, which is a cluster with measurements, where one may be given beside a cluster.

    Raises:
        ClusterError: it is no profile, or one of another cluster than the one given.
    """
    found = get_cluster(profile)
    if found.measured is None:
        raise ClusterError(f"{profile} is a cluster without measurements; make a profile with autopar profile")
    wanted = get_cluster(cluster) if cluster is not None else None
    if wanted is not None and (wanted.n_devices, kinds(wanted)) != (found.n_devices, kinds(found)):
        raise ClusterError(
            f"profile {profile} is of {found.n_devices} devices ({', '.join(sorted(set(kinds(found))))}), the cluster "
            f"given has {wanted.n_devices} ({', '.join(sorted(set(kinds(wanted))))}); leave the cluster out"
        )
    return str(profile)


def kinds(cluster: Cluster) -> tuple[str, ...]:
    """Names of a cluster's devices, by rank."""
    return tuple(device.name for device in cluster.devices)
