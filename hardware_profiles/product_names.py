"""The profile of a GPU, by its driver name (``torch.cuda.get_device_name``) and its memory.

Names of products begin alike and mean other chips: L4, L40 and L40S; B200 and GB200; H200 and GH200; an H100 on SXM, on
PCIe and as NVL. So a name is read in whole words, every one of which must be accounted for: those that a product
requires, and those that it may have. Of several products that fit, the one that requires the most words is meant. A
name with an unaccounted word is no product of the table, however familiar the rest looks. The memory decides what a
name leaves open, or an operator changed: a device with other memory than the profile's is not that device.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .load import load_device

MEMORY_MAY_DIFFER = 0.12
"""Part of a profile's memory by which a device's own number may differ: data sheets count in other units, and the
driver keeps something for itself."""
MAKERS = frozenset({"nvidia", "tesla", "geforce", "graphics", "device", "amd", "instinct", "google", "aws"})


class Product(NamedTuple):
    """A profile's device, the words that its name must have, and those that it may have in addition."""

    device: str
    needs: str
    may: str = ""


PRODUCTS = (
    Product("V100-SXM2-16GB", "v100 sxm2 16gb"),
    Product("V100-SXM2-32GB", "v100 sxm2 32gb", "ls"),
    Product("V100-SXM3-32GB", "v100 sxm3 32gb", "h"),
    Product("T4", "t4"),
    Product("L4", "l4"),
    Product("L40S", "l40s"),
    Product("RTX-4090", "rtx 4090"),
    Product("RTX-PRO-6000-Blackwell-Server", "rtx pro 6000 blackwell server", "edition"),
    Product("RTX-3090", "rtx 3090"),
    Product("RTX-5090", "rtx 5090"),
    Product("RTX-A6000", "rtx a6000"),
    Product("A10G", "a10g"),
    Product("A30", "a30", "24gb pcie"),
    Product("A100-SXM-40GB", "a100 sxm4 40gb"),
    Product("A100-SXM-80GB", "a100 sxm4 80gb"),
    Product("A100-PCIe-80GB", "a100 pcie 80gb"),
    Product("A100-PCIe-40GB", "a100 pcie 40gb"),
    Product("A800-SXM-80GB", "a800 sxm4 80gb"),
    Product("H100-SXM-80GB", "h100 hbm3", "80gb sxm5"),
    Product("H100-SXM-80GB", "h100 sxm5", "80gb"),
    Product("H100-SXM-96GB-HBM2e-500W", "h100 96gb hbm2e", "sxm5"),
    Product("H100-PCIe-80GB", "h100 pcie", "80gb"),
    Product("H100-NVL-94GB", "h100 nvl", "94gb"),
    Product("H20-SXM-96GB", "h20", "96gb hbm3 sxm5"),
    Product("H800-SXM-80GB", "h800", "80gb hbm3 sxm5"),
    Product("H200-SXM-141GB", "h200", "141gb hbm3e sxm5"),
    Product("GH200-96GB", "gh200", "480gb 96gb hbm3"),
    Product("GH200-144GB", "gh200 144g hbm3e"),
    Product("B200", "b200", "180gb hbm3e sxm6"),
    Product("B300", "b300", "sxm6 ac"),
    Product("GB200", "gb200", "nvl"),
    Product("GB300", "gb300", "nvl"),
    Product("MI250X-GCD", "mi250x", "mi200 mi250"),
    Product("MI250X-GCD", "mi250", "mi200 mi250x"),
    Product("MI300X", "mi300x", "oam vf hf"),
    Product("MI325X", "mi325x", "oam vf"),
    Product("MI355X", "mi355x", "oam vf"),
    Product("TPU-v4", "tpu v4"),
    Product("TPU-v5e", "tpu v5 lite"),
    Product("TPU-v5e", "tpu v5e"),
    Product("TPU-v5p", "tpu v5"),
    Product("TPU-v5p", "tpu v5p"),
    Product("TPU-v6e", "tpu v6 lite"),
    Product("TPU-v6e", "tpu v6e"),
    Product("Trainium2", "trainium2"),
    Product("Trainium2", "trn2"),
)


class Named(NamedTuple):
    """The meaning of a name: a device of the profiles, or None with the reason."""

    device: str | None
    reason: str = ""


def words_of(name: str) -> frozenset[str]:
    """Return the words of a product's name, without its maker's."""
    return frozenset(re.findall(r"[a-z0-9]+", name.lower())) - MAKERS


def device_named(name: str, memory_bytes: float | None = None) -> Named:
    """Return the profile of a GPU by the driver's ``name`` (``NVIDIA H100 80GB HBM3``) and all of its memory."""
    words = words_of(name)
    if "mig" in words:
        return Named(None, f"'{name}' is a slice (MIG) of a GPU: profiles are of whole ones")
    fitting = [p for p in PRODUCTS if {*p.needs.split()} <= words <= {*p.needs.split(), *p.may.split()}]
    if not fitting:
        return Named(None, f"no profile is of '{name}'{_nearest(words)}")
    device = load_device(max(fitting, key=lambda p: len(p.needs.split())).device)
    if memory_bytes is not None and abs(memory_bytes / device.memory_bytes - 1) > MEMORY_MAY_DIFFER:
        return Named(
            None,
            f"'{name}' has {memory_bytes / 1e9:.0f} GB of memory, the profile {device.name} "
            f"{device.memory_bytes / 1e9:.0f} GB",
        )
    return Named(device.name)


def _nearest(words: frozenset[str]) -> str:
    """Return the difference to the product with most words in common, as the end of a message."""
    common = {p: len(words & {*p.needs.split(), *p.may.split()}) for p in PRODUCTS if words & {p.needs.split()[0]}}
    if not common:
        return ""
    nearest = max(common, key=lambda p: common[p])
    needs = {*nearest.needs.split()}
    lacks, more = sorted(needs - words), sorted(words - needs - {*nearest.may.split()})
    told = [*([f"lacks {' '.join(lacks)}"] if lacks else []), *([f"has {' '.join(more)}"] if more else [])]
    return f": it is not {nearest.device}, since its name {' and '.join(told)}"
