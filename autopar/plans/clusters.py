"""Clusters by name or file, and the names by which plans remember them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.errors import ClusterError, MeshError
from autopar.words.meshes import Mesh
from hardware_profiles import (
    Cluster,
    ProfileError,
    load_cluster,
    software_named,
    split_software,
    split_subset,
    subset_suffix,
)  # fmt: skip
from hardware_profiles.software import AS

FILES = (".toml", ".json")


def get_cluster(cluster: str | Path | Cluster) -> Cluster:
    """Return a cluster by name, by file, or unchanged.

    Raises:
        ClusterError: there is none of that name, or the file is malformed or cannot be read. ``hardware_profiles``
            stands alone and raises its own error, which is no :class:`~autopar.errors.AutoparError`.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, str) and is_axes(cluster):
        raise ClusterError(
            f"'{cluster}' is the axes of a mesh, where a cluster is wanted: give the cluster's name or file there "
            "('autopar clusters' lists the names), and the axes as the mesh"
        )
    try:
        return load_cluster(cluster)
    except ProfileError as error:
        raise ClusterError(str(error)) from error
    except OSError as error:
        raise ClusterError(f"cannot read cluster file {cluster}: {error.strerror}") from error


def is_axes(text: str) -> bool:
    """Check whether a text is the axes of a mesh, such as ``data=2``, and no cluster: their names have no ``=``."""
    return "=" in text and not any(ending in text for ending in FILES)


def reference(cluster: str | Path | Cluster) -> str:
    """Return what a plan keeps to find the cluster again: its name, or the absolute path of its file.

    Plan files turn the path into one relative to themselves when they are saved.
    """
    if isinstance(cluster, Cluster):
        return cluster.name
    return in_file(str(cluster), lambda path: path.resolve().as_posix())


def in_file(cluster: str, change: Callable[[Path], str]) -> str:
    """Return a cluster's name with the path of its file, if it has one, changed by ``change``.

    The devices and the software with which the name ends stay.
    """
    named, trainer = split_software(cluster)
    whole, ranks = split_subset(named)
    if not whole.endswith(FILES):
        return cluster
    changed = change(Path(whole)) + (subset_suffix(ranks) if ranks else "")
    return changed if trainer is None else f"{changed}{AS}{trainer}"


def as_trainer(cluster: str, trainer: str) -> str:
    """Return the name of a cluster as a trainer uses it: ``dgx-h100 as nemo``.

    Raises:
        ClusterError: the name says another trainer, or there is none of that name.
    """
    _, named = split_software(cluster)
    if named is not None and named != trainer:
        raise ClusterError(f"the cluster '{cluster}' is for {named}, and --as says {trainer}: leave one of them out")
    try:
        software_named(trainer)
    except ProfileError as error:
        raise ClusterError(str(error)) from error
    return cluster if named is not None else f"{cluster}{AS}{trainer}"


def profile_of(profile: str | Path, cluster: str | Path | Cluster | None = None) -> str:
    """Return the path of a profile file, a cluster with measurements, that may be given with a cluster.

    Raises:
        ClusterError: it is no profile, or one of another cluster than the one given.
    """
    profiled = get_cluster(profile)
    if not profiled.is_profile:
        raise ClusterError(f"{profile} is a cluster without measurements; make a profile with autopar profile")
    wanted = get_cluster(cluster) if cluster is not None else None
    if wanted is not None and (wanted.n_devices, kinds(wanted)) != (profiled.n_devices, kinds(profiled)):
        raise ClusterError(
            f"profile {profile} is of {profiled.n_devices} devices ({', '.join(sorted(set(kinds(profiled))))}), the "
            f"cluster given has {wanted.n_devices} ({', '.join(sorted(set(kinds(wanted))))}); leave the cluster out"
        )
    return str(profile)


def kinds(cluster: Cluster) -> tuple[str, ...]:
    """Return the names of a cluster's devices, by rank."""
    return tuple(device.name for device in cluster.devices)


def check_mesh(mesh: Mesh, cluster: Cluster) -> None:
    """Refuse a mesh that the cluster cannot hold.

    Raises:
        MeshError: no axes, a size below one, a repeated name, or more devices than the cluster has.
    """
    if not mesh:
        raise MeshError("the mesh has no axes; give at least one, such as data=2")
    names = [name for name in mesh.names]
    if len(set(names)) != len(names):
        raise MeshError(f"the mesh names an axis twice: {', '.join(names)}")
    for name, size in mesh:
        if size < 1:
            raise MeshError(f"axis '{name}' has size {size}; sizes are 1 or more")
    need = mesh.n_devices
    if need > cluster.n_devices:
        raise MeshError(
            f"the mesh {mesh.shown()} needs {need} devices, cluster '{cluster.name}' has "
            f"{cluster.n_devices}; use smaller axes or a larger cluster"
        )
