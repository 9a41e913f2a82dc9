"""Names of GPUs, as their drivers give them, are the right profile, or none with the reason."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hardware_profiles import device_named, list_devices, load_device
from hardware_profiles.product_names import PRODUCTS

MIB = 1 << 20
KNOWN = [  # name, memory that the driver gives in MiB, profile
    ("Tesla V100-SXM2-16GB", 16160, "V100-SXM2-16GB"),
    ("Tesla V100-SXM2-32GB", 32510, "V100-SXM2-32GB"),
    ("Tesla V100-SXM2-32GB-LS", 32510, "V100-SXM2-32GB"),
    ("Tesla T4", 15102, "T4"),
    ("NVIDIA L4", 22563, "L4"),
    ("NVIDIA L40S", 45467, "L40S"),
    ("NVIDIA GeForce RTX 4090", 24210, "RTX-4090"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97251, "RTX-PRO-6000-Blackwell-Server"),
    ("NVIDIA A30", 24062, "A30"),
    ("A100-SXM4-40GB", 40536, "A100-SXM-40GB"),
    ("NVIDIA A100-SXM4-40GB", 40441, "A100-SXM-40GB"),
    ("NVIDIA A100-SXM4-80GB", 81151, "A100-SXM-80GB"),
    ("NVIDIA A100 80GB PCIe", 81154, "A100-PCIe-80GB"),
    ("NVIDIA A800-SXM4-80GB", 81251, "A800-SXM-80GB"),
    ("NVIDIA H100 80GB HBM3", 81105, "H100-SXM-80GB"),
    ("NVIDIA H100 PCIe", 81008, "H100-PCIe-80GB"),
    ("NVIDIA H100 96GB HBM2e", 95000, "H100-SXM-96GB-HBM2e-500W"),
    ("NVIDIA H800", 81105, "H800-SXM-80GB"),
    ("NVIDIA H200", 143156, "H200-SXM-141GB"),
    ("NVIDIA GH200 480GB", 97000, "GH200-96GB"),
    ("NVIDIA B200", 182642, "B200"),
    ("NVIDIA B300 SXM6 AC", 275040, "B300"),
    ("NVIDIA GB200", 189471, "GB200"),
    ("NVIDIA GB300", 284208, "GB300"),
    ("NVIDIA A10G", 22563, "A10G"),
    ("NVIDIA A100-PCIE-40GB", 40326, "A100-PCIe-40GB"),
    ("NVIDIA H100 NVL", 95830, "H100-NVL-94GB"),
    ("NVIDIA H20", 97871, "H20-SXM-96GB"),
    ("NVIDIA GH200 144G HBM3e", 146831, "GH200-144GB"),
    ("Tesla V100-SXM3-32GB", 32510, "V100-SXM3-32GB"),
    ("NVIDIA GeForce RTX 5090", 32607, "RTX-5090"),
    ("NVIDIA GeForce RTX 3090", 24253, "RTX-3090"),
    ("NVIDIA RTX A6000", 48539, "RTX-A6000"),
    ("AMD Instinct MI250X", 65520, "MI250X-GCD"),
    ("AMD Instinct MI300X", 196592, "MI300X"),
    ("AMD Instinct MI300X OAM", 196592, "MI300X"),
    ("AMD Instinct MI325X", 262128, "MI325X"),
    ("AMD Instinct MI355X", 294896, "MI355X"),
    ("TPU v4", 32768, "TPU-v4"),
    ("TPU v5 lite", 16384, "TPU-v5e"),
    ("TPU v5", 97280, "TPU-v5p"),
    ("TPU v6 lite", 32768, "TPU-v6e"),
    ("trn2", 98304, "Trainium2"),
]
UNKNOWN = [  # and a word of the reason
    ("NVIDIA L40", 45467, "no profile is of 'NVIDIA L40'"),
    ("NVIDIA L20", 45467, "no profile"),
    ("NVIDIA L2", 22563, "no profile"),
    ("NVIDIA A10", 22563, "no profile"),
    ("NVIDIA A2", 14910, "no profile"),
    ("NVIDIA A16", 14910, "no profile"),
    ("NVIDIA A40", 45416, "no profile"),
    ("NVIDIA A100-SXM-64GB", 64991, "no profile"),
    ("NVIDIA A100X", 81154, "no profile"),
    ("NVIDIA A800 80GB PCIe", 81251, "not A800-SXM-80GB, since its name lacks sxm4 and has pcie"),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9728, "a slice (MIG)"),
    ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 40192, "a slice (MIG)"),
    ("NVIDIA H100", 65247, "since its name lacks"),
    ("NVIDIA H100 64GB HBM3", 65247, "has 64gb"),
    ("NVIDIA H800 PCIe", 81105, "has pcie"),
    ("NVIDIA H200 NVL", 143771, "has nvl"),
    ("NVIDIA B100", 192000, "no profile"),
    ("Tesla V100-PCIE-16GB", 16160, "lacks sxm2 and has pcie"),
    ("Tesla V100S-PCIE-32GB", 32510, "no profile"),
    ("Tesla P100-PCIE-16GB", 16280, "no profile"),
    ("NVIDIA GeForce RTX 4090 D", 24210, "has d"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "has gpu laptop"),
    ("NVIDIA RTX 6000 Ada Generation", 48539, "no profile"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97251, "lacks server and has workstation"),
    ("NVIDIA H20 NVL", 97871, "has nvl"),
    ("AMD Instinct MI300A", 131072, "no profile"),
    ("TPU v7", 196608, "no profile"),
    ("GRID T4-16Q", 16000, "has 16q grid"),
]


@pytest.mark.parametrize(("name", "mib", "device"), KNOWN)
def test_a_name_is_its_profile(name: str, mib: int, device: str) -> None:
    assert device_named(name, mib * MIB) == (device, "")
    assert device_named(name) == (device, "")


@pytest.mark.parametrize(("name", "mib", "reason"), UNKNOWN)
def test_a_name_without_a_profile_says_why(name: str, mib: int, reason: str) -> None:
    device, said = device_named(name, mib * MIB)
    assert device is None and reason in said and name in said


def test_other_memory_is_another_device() -> None:
    assert device_named("NVIDIA H100 80GB HBM3", 64e9) == (
        None, "'NVIDIA H100 80GB HBM3' has 64 GB of memory, the profile H100-SXM-80GB 80 GB"
    )  # fmt: skip


def test_every_device_of_the_profiles_has_a_name() -> None:
    assert {p.device for p in PRODUCTS} == {*list_devices()} - {"cpu-core"}
    assert all(load_device(p.device).name == p.device for p in PRODUCTS)


def test_memory_tells_devices_of_one_name_apart() -> None:
    """The part by which memory may differ is less than what lies between any two sizes of one chip."""
    for chip in ("V100-SXM2", "A100-SXM", "A100-PCIe", "H100-SXM"):
        sizes = sorted({load_device(d).memory_bytes for d in list_devices() if d.startswith(chip)})
        assert all(larger / smaller - 1 > 0.12 for smaller, larger in pairwise(sizes))
