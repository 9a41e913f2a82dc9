"""Hardware as data: devices, links, curves, clusters. Floor 0: imports nothing of the project.

===================== =================================================================================================
:mod:`.model`         devices, links, clusters; :mod:`.abstract`: meshes without devices
:mod:`.load`          names become devices, links and curves; :mod:`.clusters`: files become clusters
:mod:`.composed`      clusters of a few words (so many GPUs, so many to a machine); :mod:`.describing`: files of such
:mod:`.software`      training software on a cluster, one record each; :mod:`.published_errors`: deviations of
                      predictions from published runs
:mod:`.engines`       engines that serve models, one record each; :mod:`.small_rates`: rates of few rows, small
                      messages
:mod:`.host_links`    the way from a device to the memory of its host, and that memory
:mod:`.usable_memory` memory of a device that a process can use
:mod:`.profile_file`  files of measurements; :mod:`.measurements`: the same as values
:mod:`.product_names` the device of a GPU's driver name
:mod:`.strict`        one strict reader of files; :mod:`.reader`: of their tables; :mod:`.errors`: its errors
===================== =================================================================================================
"""

from .abstract import abstract_cluster
from .clusters import build_cluster, cluster_from, list_clusters, load_cluster, split_subset
from .errors import ProfileError
from .host_links import HostLink
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
    "Cluster", "CollectiveCurve", "Device", "EfficiencyCurve", "ErrorBand", "HostLink", "Link", "Named", "ProfileError",
    "Software", "abstract_cluster", "budget_of", "build_cluster", "cluster_from", "device_named", "error_band",
    "is_gpu", "list_clusters", "list_devices", "load_cluster", "load_device", "software_named", "speed_of",
    "split_software", "split_subset", "subset_suffix",
]  # fmt: skip
