"""What a cluster can do, as data: devices, links, curves. Floor 0: imports nothing of the project.

===================== =================================================================================================
:mod:`.model`         the nouns; :mod:`.abstract`: meshes without devices
:mod:`.load`          names become devices, links and curves; :mod:`.clusters`: files become clusters
:mod:`.composed`      clusters of a few words (so many GPUs, so many to a machine)
:mod:`.software`      what trains on a cluster, one record for each trainer; :mod:`.published_errors`: how far its
                      published runs were from their prices
:mod:`.usable_memory` what a process may fill of a device's memory
:mod:`.profile_file`  files of what was measured; :mod:`.measurements`: the same as values
:mod:`.product_names` which of the devices a GPU is, by the name that its driver gives
:mod:`.strict`        one strict reader of files; :mod:`.reader`: of their tables; :mod:`.errors`: what it raises
===================== =================================================================================================
"""

from .abstract import abstract_cluster
from .clusters import build_cluster, cluster_from, list_clusters, load_cluster, split_subset
from .errors import ProfileError
from .load import list_devices, load_device
from .model import (
    COLLECTIVES,
    CURVES,
    MOVING_KINDS,
    OP_KINDS,
    AbstractAxis,
    Cluster,
    CollectiveCurve,
    Device,
    EfficiencyCurve,
    Link,
    speed_of,
    subset_suffix,
)
from .product_names import Named, device_named
from .published_errors import ErrorBand, error_band
from .software import Software, software_named, split_software
from .usable_memory import COUNT_MARGIN, UNKNOWN_FRACTION, Budget, budget_of, is_gpu

__all__ = [
    "COLLECTIVES", "COUNT_MARGIN", "CURVES", "MOVING_KINDS", "OP_KINDS", "UNKNOWN_FRACTION", "AbstractAxis", "Budget",
    "Cluster", "CollectiveCurve", "Device", "EfficiencyCurve", "ErrorBand", "Link", "Named", "ProfileError",
    "Software", "abstract_cluster", "budget_of", "build_cluster", "cluster_from", "device_named", "error_band",
    "is_gpu", "list_clusters", "list_devices", "load_cluster", "load_device", "software_named", "speed_of",
    "split_software", "split_subset", "subset_suffix",
]  # fmt: skip
