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
