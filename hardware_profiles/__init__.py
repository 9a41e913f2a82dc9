"""What a cluster can do, as data: devices, links, curves. Floor 0: imports nothing of the project."""

from .abstract import abstract_cluster
from .clusters import build_cluster, list_clusters, load_cluster
from .errors import ProfileError
from .load import list_devices, load_device
from .model import (
    COLLECTIVES,
    OP_KINDS,
    AbstractAxis,
    Cluster,
    CollectiveCurve,
    Device,
    EfficiencyCurve,
    Link,
)

__all__ = [
    "COLLECTIVES", "OP_KINDS", "AbstractAxis", "Cluster", "CollectiveCurve", "Device", "EfficiencyCurve",
    "Link", "ProfileError", "abstract_cluster", "build_cluster", "list_clusters", "list_devices",
    "load_cluster", "load_device",
]  # fmt: skip
