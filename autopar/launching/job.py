"""Jobs: the machines of a cluster in the order of ranks, what every rank runs, and its environment.

Ranks are numbered machine by machine in the order of the cluster's devices. Machines get fixed numbers (torchrun's
static rendezvous): its rendezvous ``c10d`` numbers machines by the alphabetical order of their host names, which for
machines of several kinds is another order than that of the plan.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from autopar.errors import ClusterError
from cost_models.host_link import copies_of
from hardware_profiles import Cluster, split_software, split_subset

MOST_DEVICES_OF_A_HOST = 16
"""Most accelerators of one host (DGX-2, Trn2); a larger domain, such as NVL72, is several hosts."""
DEVICES_OF_A_TRAY = 4
"""GPUs of a host of an NVL72 domain: 18 compute trays of 4 GPUs (NVIDIA GB200 NVL72 data sheet)."""
THREADS = "OMP_NUM_THREADS"
"""Variable with the threads of each rank on processors, which torchrun sets to 1 where it is not set."""
PORT = 29500
"""Default port of the rendezvous, that of torchrun."""

FIELDS = ("nodes", "node", "per_node", "ranks", "host", "port")
"""Fields of a launcher's words: number of machines, number of this one, its ranks, all ranks, the name of machine 0 and
its port."""
TORCHRUN = (
    "torchrun", "--nnodes", "{nodes}", "--node-rank", "{node}", "--nproc-per-node", "{per_node}",
    "--master-addr", "{host}", "--master-port", "{port}",
)  # fmt: skip
"""Default launcher of one machine's ranks."""


@dataclass(frozen=True)
class Machines:
    """Machines that are alike and follow each other in the order of ranks.

    Attributes:
        count: number of machines.
        ranks: ranks on each.
        device: name of the device.
        size: devices of each machine, of which the job uses ``ranks``.
        visible: numbers of the devices on the machine that the job uses, by local rank; empty for the first ones.
    """

    count: int
    ranks: int
    device: str
    size: int
    visible: tuple[int, ...] = ()


@dataclass(frozen=True)
class Launch:
    """A job: machines in the order of ranks, and what starts their ranks.

    Attributes:
        machines: neighbours that differ.
        argv: what every rank runs, after the launcher's own words: ``train.py ...`` or ``-m module ...``.
        environment: variables of every rank.
        launcher: words that start the ranks of one machine, with :data:`FIELDS` in braces.
        notes: sentences for the reader.
        on_gpu: whether ranks compute on accelerators.
    """

    machines: tuple[Machines, ...]
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    launcher: tuple[str, ...] = TORCHRUN
    notes: tuple[str, ...] = ()
    on_gpu: bool = True

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return sum(each.count for each in self.machines)

    @property
    def per_node(self) -> tuple[int, ...]:
        """Ranks of every machine, in order."""
        return tuple(each.ranks for each in self.machines for _ in range(each.count))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return sum(self.per_node)

    def command(self, *, node: str, per_node: str, host: str, port: str) -> str:
        """Return the command line that starts the ranks of one machine.

        Arguments are words of the shell, which may be variables such as ``"$node"``; they are not quoted here.
        """
        values = dict(zip(FIELDS, (str(self.nodes), node, per_node, str(self.ranks), host, port), strict=True))
        return " ".join([*(_filled(word, values) for word in self.launcher), *map(shlex.quote, self.argv)])

    def commands(self, host: str, port: int = PORT) -> list[str]:
        """Return the command line of every machine, in order; ``host`` is the name of machine 0."""
        where = {"host": shlex.quote(host), "port": str(port)}
        return [self.command(node=str(node), per_node=str(n), **where) for node, n in enumerate(self.per_node)]


def _filled(word: str, values: Mapping[str, str]) -> str:
    """Fill the fields of a launcher's word; the rest is quoted for the shell."""
    parts = re.split(rf"\{{({'|'.join(FIELDS)})\}}", word)
    return "".join(values[part] if i % 2 else (shlex.quote(part) if part else "") for i, part in enumerate(parts))


def machines_named(name: str, load: Callable[[str], Cluster]) -> tuple[Cluster, tuple[int, ...]]:
    """Return the whole cluster of a name, and the devices of it that the name chooses, in the order of ranks.

    ``dgx-h100@4-7`` are devices 4 to 7 of ``dgx-h100``, which keep these numbers on their machine. ``load`` returns
    the cluster of a name without such a choice.
    """
    text, ranks = split_subset(split_software(name)[0])
    cluster = load(text)
    return cluster, ranks or tuple(range(cluster.n_devices))


def launch_of(
    cluster: Cluster, argv: Sequence[str], environment: Mapping[str, str] | None = None, *,
    devices: Sequence[int] | None = None, per_host: int | None = None, launcher: Sequence[str] = TORCHRUN,
    steps_on_host: bool = False,
) -> Launch:  # fmt: skip
    """Return the job on a cluster's machines.

    Args:
        cluster: all machines.
        argv: what every rank runs, after the launcher's own words.
        environment: variables that override those that follow from the cluster, or add to them.
        devices: the cluster's device of every rank; by default all devices in order.
        per_host: devices of a host, where a machine of the cluster is several hosts (an NVL72 domain).
        launcher: words that start the ranks of one machine, such as :data:`TORCHRUN`.
        steps_on_host: whether the optimizer steps on the host, which takes all its cores to be as fast as its price.

    Raises:
        ClusterError: the cluster lacks a device, is abstract, has devices on which torch starts no process, or
            processors beside accelerators; ranks of a machine do not follow each other; or a machine is too large for
            one host.
    """
    used = tuple(range(cluster.n_devices)) if devices is None else tuple(devices)
    _check_devices(cluster, used)
    on_gpu = cluster.devices[used[0]].kernel_seconds is not None
    machines, notes = _machines(cluster, used, per_host if on_gpu else 0)
    if idle := cluster.n_devices - len(used):
        notes.append(f"{idle} of the cluster's {cluster.n_devices} devices are left idle")
    several = sum(each.count for each in machines) > 1
    own, more = _environment(cluster, several) if on_gpu else ({}, [])
    given = dict(environment or {})
    threads = 1
    if steps_on_host and THREADS not in given:
        threads, why = _threads_of_step(cluster, used[0])
        notes.append(why)
    variables = {THREADS: str(threads)} | own | given
    return Launch(machines, tuple(argv), variables, tuple(launcher), (*notes, *more), on_gpu)


def _threads_of_step(cluster: Cluster, device: int) -> tuple[int, str]:
    """Return the threads of a rank whose optimizer steps on the host, and a note."""
    host = copies_of(cluster, cluster.devices[device])
    if host is None or not host.threads:
        return 1, (
            f"the optimizer steps on the host with one thread, as {THREADS}=1 says, several times slower than priced: "
            "set it to the cores of a machine over its ranks"
        )
    return host.threads, (
        f"{THREADS}={host.threads}: the optimizer steps on the host, which has so many cores for each device "
        f"({host.link.name}); on another host set it to the cores of a machine over its ranks"
    )


def _check_devices(cluster: Cluster, used: Sequence[int]) -> None:
    """Refuse devices that are not there, or on which torch starts no process."""
    if cluster.abstract:
        raise ClusterError(f"cluster '{cluster.name}' is an abstract mesh without machines; plan for a real cluster")
    if not used or max(used) >= cluster.n_devices:
        raise ClusterError(
            f"the job has {len(used)} ranks, the last one on device {max(used, default=0)}, and cluster "
            f"'{cluster.name}' has {cluster.n_devices} devices; plan for that cluster, or launch on a larger one"
        )
    kinds = {cluster.devices[rank].name: cluster.devices[rank] for rank in used}
    for device in kinds.values():
        if device.link.startswith(("ici", "neuronlink")):
            raise ClusterError(
                f"cluster '{cluster.name}' has {device.name}, and launch scripts start processes of torch on GPUs or "
                "processors alone; start the job with the vendor's own tools"
            )
    if len({device.kernel_seconds is None for device in kinds.values()}) > 1:
        raise ClusterError(
            f"cluster '{cluster.name}' has processors beside accelerators ({', '.join(kinds)}), and a job runs on one "
            "of the two; choose devices of one kind: NAME@0-3"
        )
    nodes = [node for node, _ in groupby(cluster.node_of[rank] for rank in used)]
    twice = [node for node, times in Counter(nodes).items() if times > 1]
    if twice:
        raise ClusterError(
            f"ranks on machine {twice[0]} of cluster '{cluster.name}' have ranks of other machines between them, and "
            "launchers number ranks machine by machine; choose devices in the order of machines: NAME@0-3,8-11"
        )


def _machines(
    cluster: Cluster, used: Sequence[int], per_host: int | None
) -> tuple[tuple[Machines, ...], list[str]]:  # fmt: skip
    """Return the machines in the order of ranks, those that are alike together, and notes.

    ``per_host`` 0: a machine is one host, whatever its size.
    """
    first: dict[int, int] = {}
    for rank, node in enumerate(cluster.node_of):
        first.setdefault(node, rank)
    sizes = Counter(cluster.node_of)
    of_larger = re.search(r"-\d+of(\d+)", cluster.name) if "+" not in cluster.name else None
    machines: list[Machines] = []
    notes: list[str] = []
    for node, ranks in groupby(used, key=lambda rank: cluster.node_of[rank]):
        members = list(ranks)
        size = sizes[node]
        device = " and ".join(dict.fromkeys(cluster.devices[rank].name for rank in members))
        host_size = size if per_host == 0 else _host_size(size, per_host, cluster.name, device)
        if host_size < size:
            notes = [f"a machine of the cluster is {size} devices on hosts of {host_size} (--per-host for others)"]
        for _, block in groupby((rank - first[node] for rank in members), key=lambda number: number // host_size):
            numbers = tuple(number % host_size for number in block)
            visible = () if numbers == tuple(range(len(numbers))) else numbers
            whole = int(of_larger[1]) if of_larger else host_size
            machines.append(Machines(1, len(numbers), device, whole, visible))
    alike = [(machine, len(list(equal))) for machine, equal in groupby(machines)]
    return tuple(Machines(n, one.ranks, one.device, one.size, one.visible) for one, n in alike), notes


def _host_size(size: int, per_host: int | None, cluster: str, device: str) -> int:
    """Return the devices of a host, of a machine of ``size`` devices."""
    if per_host is None and size <= MOST_DEVICES_OF_A_HOST:
        return size
    if per_host is None and device.startswith("GB") and size % DEVICES_OF_A_TRAY == 0:
        return DEVICES_OF_A_TRAY
    if per_host is None:
        raise ClusterError(
            f"a machine of cluster '{cluster}' has {size} devices, and one host has at most {MOST_DEVICES_OF_A_HOST}; "
            "say how many a host has: --per-host 8"
        )
    if size % per_host:
        raise ClusterError(
            f"--per-host is {per_host}, and a machine of cluster '{cluster}' has {size} devices, which do not fill "
            f"hosts of {per_host}; give a divisor of {size}"
        )
    return per_host


def _environment(cluster: Cluster, several: bool) -> tuple[dict[str, str], list[str]]:
    """Return the variables that follow from GPUs and the links between machines, and notes."""
    variables = {"NCCL_DEBUG": "WARN"}
    if not cluster.devices[0].link.startswith("xgmi"):
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # neighbours on the bus are neighbours on the mesh
    if not several:
        return variables, []
    ends = [(a, b, link) for a, b, link in cluster.graph.edges(data="link")]
    between = [link for a, b, link in ends if any(re.search(r"/nic\d+$", str(end)) for end in (a, b))]
    notes = []
    if any(link.sums for link in between):
        variables["NCCL_COLLNET_ENABLE"] = "1"
        notes.append(
            "the plan's prices assume that switches add up what machines send (SHARP): NCCL_COLLNET_ENABLE=1 asks for "
            "that, and NCCL needs the network's plugin for it"
        )
    if any(link.curve.startswith("efa") for link in between):
        variables["FI_PROVIDER"] = "efa"
        notes.append("NCCL needs the aws-ofi-nccl plugin on every machine to use EFA")
    if any(link.curve.startswith(("ethernet", "tcp")) for link in between):
        notes.append("where machines have several network interfaces, name the fast one: --env NCCL_SOCKET_IFNAME=NAME")
    return variables, notes
