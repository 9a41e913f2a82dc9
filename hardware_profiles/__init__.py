"""What a cluster can do, as data: devices, links, curves. Floor 0: imports nothing of the project.

===================== =================================================================================================
:mod:`.model`         the nouns; :mod:`.abstract`: meshes without devices
:mod:`.load`          names become devices, links and curves; :mod:`.clusters`: files become clusters
:mod:`.software`      what trains on a cluster, one record for each trainer; :mod:`.published_errors`: how far its
                      published runs were from their prices
:mod:`.profile_file`  files of what was measured; :mod:`.measurements`: the same as values
:mod:`.product_names` which of the devices a GPU is, by the name that its driver gives
:mod:`.strict`        one strict reader of files; :mod:`.reader`: of their tables; :mod:`.errors`: what it raises
===================== =================================================================================================
"""

from .abstract import abstract_cluster
from .clusters import build_cluster, list_clusters, load_cluster, split_subset
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
    speed_of,
    subset_suffix,
)
from .product_names import Named, device_named
from .software import Software, software_named, split_software

__all__ = [
    "COLLECTIVES", "OP_KINDS", "AbstractAxis", "Cluster", "CollectiveCurve", "Device", "EfficiencyCurve",
    "Link", "Named", "ProfileError", "Software", "abstract_cluster", "build_cluster", "device_named", "list_clusters",
    "list_devices", "load_cluster", "load_device", "software_named", "speed_of", "split_software", "split_subset",
    "subset_suffix",
]  # fmt: skip
