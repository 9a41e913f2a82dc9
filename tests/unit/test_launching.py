"""Scripts that start a plan: machines in the order of ranks, for bash, Slurm and torchrun; clusters of one's own."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import command, plan_all

from autopar.errors import ClusterError
from autopar.launching.job import Launch, launch_of, machines_named
from autopar.launching.scripts import described, slurm, torchrun
from hardware_profiles import load_cluster

SCRIPT = ("train.py", "--name", "it's a $HOME", "--lr", "1e-3")
MIXED = "dgx-h100-x2+dgx-a100"


def job(name: str, n: int | None = None, **more: object) -> Launch:
    cluster, devices = machines_named(name, load_cluster)
    return launch_of(cluster, SCRIPT, devices=devices[:n], **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "n", "per_node", "visible"),
    [
        ("dgx-a100-40gb-x4", None, (8, 8, 8, 8), ()),
        ("dgx-a100-40gb-x4", 20, (8, 8, 4), ()),
        ("dgx-h100-4of8-x2", None, (4, 4), ()),
        ("dgx-h100@4-7", None, (4,), (4, 5, 6, 7)),
        ("dgx-h100-x2@0-3,8-11", None, (4, 4), ()),
        ("dgx-h100-x2@4-7,8-11", None, (4, 4), (4, 5, 6, 7)),
        (MIXED, None, (8, 8, 8), ()),
        ("nvl72-gb200", None, (4,) * 18, ()),
        ("local-x2", None, (2,), ()),
        ("local-x32", None, (32,), ()),
    ],
)
def test_machines_are_those_of_the_cluster(name: str, n: int | None, per_node: tuple, visible: tuple) -> None:
    found = job(name, n)
    assert found.per_node == per_node and found.machines[0].visible == visible
    assert described(found)[0].startswith(f"{sum(per_node)} ranks on {len(per_node)} machine")
    for text in (torchrun(found), slurm(found, "my job", ["partition=gpu"])):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    words = [shlex.split(line) for line in found.commands("first host")]
    assert [line[line.index("--nproc-per-node") + 1] for line in words] == [str(n) for n in per_node]
    assert [line[line.index("--node-rank") + 1] for line in words] == [str(k) for k in range(len(per_node))]
    assert all(line[-5:] == [*SCRIPT] and "first host" in line for line in words)


def test_the_environment_follows_from_the_cluster() -> None:
    assert job("local-x2").environment == {"OMP_NUM_THREADS": "1"}
    assert job("dgx-h100-x2").environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in job("mi300x-8").environment
    assert job("aws-p5-x2").environment["FI_PROVIDER"] == "efa" and "FI_PROVIDER" not in job("aws-p5").environment
    sums = job("16xH100-SXM-80GB/8/nvlink4/ib-ndr-sharp", environment={"OMP_NUM_THREADS": "8"})
    assert (sums.environment["NCCL_COLLNET_ENABLE"], sums.environment["OMP_NUM_THREADS"]) == ("1", "8")


@pytest.mark.parametrize(
    ("name", "threads"),
    [("dgx-h100-x2", "14"), ("dgx-h100-4of8", "14"), ("dgx-h100@0", "14"), ("alps-gh200", "72"), ("pcie-rtx4090", "1")],
)
def test_an_optimizer_on_the_host_has_the_cores_of_a_device(name: str, threads: str) -> None:
    """As many as all devices of a machine can have at once; of a desktop they are not known, which is said."""
    found = job(name, steps_on_host=True)
    assert found.environment["OMP_NUM_THREADS"] == threads
    assert f"OMP_NUM_THREADS={threads}" in found.notes[-1] and "optimizer steps on the host" in found.notes[-1]
    assert f"export OMP_NUM_THREADS={threads}\n" in torchrun(found)
    said = job(name, steps_on_host=True, environment={"OMP_NUM_THREADS": "3"})
    assert said.environment["OMP_NUM_THREADS"] == "3" and not any("OMP" in note for note in said.notes)


def test_another_launcher_gets_the_same_numbers() -> None:
    words = ("accelerate", "launch", "--num_machines", "{nodes}", "--machine_rank={node}", "--num_processes", "{ranks}",
             "--main_process_ip", "{host}", "--config_file", "a b.yaml")  # fmt: skip
    line = job("dgx-h100-x2", launcher=words).commands("n0")[1]
    assert "launch --num_machines 2 --machine_rank=1 --num_processes 16 --main_process_ip n0 --config" in line
    assert "'a b.yaml'" in line


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("tpu-v5p-64", {}, "start processes of torch on GPUs or processors alone"),
        ("trn2-16", {}, "Trainium2"),
        ("dgx-h100-x2@0,8,1", {}, "number ranks machine by machine"),
        ("nvl72-gb200", {"per_host": 5}, "do not fill hosts of 5"),
        ("dgx-h100", {"devices": (7, 8)}, "has 8 devices"),
    ],
)
def test_what_cannot_be_launched_is_refused(name: str, more: dict, message: str) -> None:
    cluster, devices = machines_named(name, load_cluster)
    with pytest.raises(ClusterError, match=message):
        launch_of(cluster, SCRIPT, **({"devices": devices} | more))


def test_large_machines_ask_for_the_size_of_a_host(tmp_path: Path) -> None:
    (tmp_path / "rack.toml").write_text(
        '[[node]]\ndevice = "H100-SXM-80GB"\nn_devices = 32\n[[node.level]]\nlink = "nvlink4"\n'
    )
    rack = load_cluster(tmp_path / "rack.toml")
    with pytest.raises(ClusterError, match="say how many a host has"):
        launch_of(rack, SCRIPT)
    assert launch_of(rack, SCRIPT, per_host=8).per_node == (8, 8, 8, 8)


def test_names_of_a_cluster_file_cannot_become_commands(tmp_path: Path) -> None:
    name = 'X\\n touch owned #'
    (tmp_path / "bad.toml").write_text(
        f'[devices."{name}"]\nmemory_bytes = 1e9\nmemory_bytes_per_second = 1e9\npeak_flops = {{ float32 = 1e12 }}\n'
        f'launch_seconds = 1e-6\nefficiency = "ada"\n[[node]]\ndevice = "{name}"\nn_devices = 1\n'
    )
    found = launch_of(load_cluster(tmp_path / "bad.toml"), SCRIPT)
    for text in (torchrun(found), slurm(found)):
        assert not any(line.strip().startswith("touch") for line in text.splitlines())


def test_options_of_sbatch() -> None:
    text = slurm(job(MIXED), "n", ["account=me", "1:partition=old", "--time=04:00:00"])
    head = text.split("#SBATCH hetjob")
    assert "--partition=old" not in head[0] and "--partition=old" in head[1]
    assert all("--account=me" in part and "--time=04:00:00" in part for part in head)
    for wrong, message in (("2:partition=x", "the job has 2"), ("rm -rf", "no option"), ("a=$(id)", "no option")):
        with pytest.raises(ClusterError, match=message):
            slurm(job(MIXED), "n", [wrong])


# --- on this machine --------------------------------------------------------------------------------------------------

FAKES = {
    "scontrol": 'echo "$3" | tr , "\\n"\n',
    "srun": 'echo "$@" > "$LOG.srun"\nwhile [[ "$1" == --* ]]; do shift; done\n'
            'for each in n2 n1 n0; do SLURMD_NODENAME=$each "$@" || exit 1; done\n',
    "torchrun": 'echo "$SLURMD_NODENAME ${CUDA_VISIBLE_DEVICES:-all} $OMP_NUM_THREADS $*" >> "$LOG"\n',
}  # fmt: skip


def fakes(folder: Path) -> dict[str, str]:
    """The environment with commands of Slurm that stand in for it on this machine."""
    (folder / "bin").mkdir()
    for name, text in FAKES.items():
        (folder / "bin" / name).write_text("#!/bin/bash\n" + text)
        (folder / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "LOG": str(folder / "log")}


@pytest.mark.parametrize(
    ("name", "n", "lists", "wanted"),
    [
        ("dgx-h100-x3", 20, {"": None, "_HET_GROUP_0": "n0,n1", "_HET_GROUP_1": "n2"}, (8, 8, 4)),
        ("dgx-h100-x3", None, {"": "n0,n1,n2"}, (8, 8, 8)),
        ("dgx-h100-x3@4-7,12-15,20-23", None, {"": "n0,n1,n2"}, (4, 4, 4)),
        (MIXED, None, {"_HET_GROUP_0": "n0,n1", "_HET_GROUP_1": "n2"}, (8, 8, 8)),
    ],
)
def test_slurm_starts_each_machine_with_its_number(
    name: str, n: int | None, lists: dict, wanted: tuple, tmp_path: Path
) -> None:
    found = job(name, n)
    (tmp_path / "job.sh").write_text(slurm(found))
    given = {f"SLURM_JOB_NODELIST{group}": text for group, text in lists.items() if text}
    env = {**fakes(tmp_path), **given, "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", str(tmp_path / "job.sh")], env=env, check=True)
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    visible = "4,5,6,7" if "@" in name else "all"
    for host, devices, threads, *words in lines:
        k = int(host[1:])
        start = f"--nnodes 3 --node-rank {k} --nproc-per-node {wanted[k]} --master-addr n0 --master-port 20007"
        assert " ".join(words).startswith(start) and (devices, threads) == (visible, "1")
    assert sorted(line[0] for line in lines) == ["n0", "n1", "n2"]
    assert ("--het-group=0-1" in (tmp_path / "log.srun").read_text()) == (len(found.machines) > 1)
    env[next(iter(given))] = "n0"
    done = subprocess.run(["bash", str(tmp_path / "job.sh")], env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "was written for 3" in done.stderr


RANKS = """
import os, sys
import torch.distributed as dist
dist.init_process_group("gloo")
found = [None] * dist.get_world_size()
dist.all_gather_object(found, (os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(repr(found))
dist.destroy_process_group()
"""


def real_torchrun(folder: Path) -> dict[str, str]:
    """The environment in which ``torchrun`` is that of this interpreter, and the port is free."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "torchrun").write_text(
        f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n'
    )
    (folder / "bin" / "torchrun").chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "MASTER_PORT": str(port)}


@pytest.mark.slow
def test_unequal_machines_number_their_ranks_one_after_the_other(tmp_path: Path) -> None:
    """Machine 0 has one rank, machine 1 two: here both are this machine."""
    node = '[[node]]\ndevice = "cpu-core"\nn_devices = {}\n{}[node.uplink]\nlink = "ethernet-10"\n'
    level = '[[node.level]]\nlink = "pcie4"\n'
    (tmp_path / "two.toml").write_text(node.format(1, "") + node.format(2, level))
    (tmp_path / "ranks.py").write_text(RANKS)
    found = launch_of(load_cluster(tmp_path / "two.toml"), [str(tmp_path / "ranks.py"), str(tmp_path / "found")])
    (tmp_path / "start.sh").write_text(torchrun(found))
    env = real_torchrun(tmp_path)
    started = [
        subprocess.Popen(["bash", str(tmp_path / "start.sh"), str(k), "127.0.0.1"], env=env, stderr=subprocess.PIPE)
        for k in (1, 0)
    ]
    try:
        for process in started:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err.decode()
    finally:
        for process in started:
            process.kill()
    assert (tmp_path / "found").read_text() == "[('0', '0'), ('1', '0'), ('1', '1')]"
    for words in ((), ("2", "127.0.0.1"), ("x", "h")):
        done = subprocess.run(["bash", str(tmp_path / "start.sh"), *words], env=env, capture_output=True, text=True)
        assert done.returncode != 0 and "usage: start.sh NODE HOST" in done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_all(tmp_path_factory.mktemp("plans"), {
        "here": ("--cluster", "local-x2", "--mesh", "data=2"),
        "far": ("--cluster", "dgx-h100-x2", "--mesh", "data=2,tensor=8"),
    })  # fmt: skip


def test_the_command(folder: Path) -> None:
    code, text, err = command("launch", folder / "far.json")
    assert code == 0, err
    assert "machines 0 to 1: 8 x H100-SXM-80GB on each, ranks 0 to 15" in text
    assert f"-m autopar run {folder / 'far.json'}" in text
    words = ("--script", "train.py --lr 1e-3", "--env", "NCCL_IB_HCA=mlx5", "--slurm", folder / "job.sh")
    code, text, err = command("launch", folder / "far.json", *words, "--sbatch", "partition=gpu", "--json")
    assert code == 0, err
    found = json.loads(text)
    assert (found["nodes"], found["ranks"], found["argv"]) == (2, 16, ["train.py", "--lr", "1e-3"])
    assert found["written"] == {"--slurm": str(folder / "job.sh")} and found["environment"]["NCCL_IB_HCA"] == "mlx5"
    assert "#SBATCH --partition=gpu" in (folder / "job.sh").read_text()
    assert command("launch", folder / "far.json", "--slurm", folder / "job.sh")[0] == 0, "its own kind is overwritten"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--env", "1A=2"), "write NAME=VALUE"),
        (("--script", "'"), "--script is"),
        (("--slurm", "net.py"), "is not a launch script"),
        (("--slurm", "-", "--torchrun", "-"), "takes one script"),
        (("--slurm", "-", "--sbatch", "0:a"), ""),
    ],
)
def test_words_that_make_no_sense(folder: Path, words: tuple[str, ...], message: str) -> None:
    code, _, err = command("launch", folder / "far.json", *(folder / w if w.endswith(".py") else w for w in words))
    assert code == (2 if message else 0) and message in " ".join(err.split())


def test_a_plan_for_another_trainer_asks_what_runs(folder: Path) -> None:
    from autopar.cli.launch import job_of
    from autopar.errors import PlanError
    from autopar.planfile import open_

    document = open_(folder / "far.json")
    document.raw["pins"] = {**document.raw.get("pins", {}), "target": "megatron"}
    with pytest.raises(PlanError, match="autopar export"):
        job_of(document, folder / "far.json", None, {}, None)
    assert job_of(document, folder / "far.json", "pretrain_gpt.py", {}, None).argv == ("pretrain_gpt.py",)


def test_the_script_starts_ranks(folder: Path) -> None:
    (folder / "ranks.py").write_text(RANKS)
    code, _, err = command("launch", folder / "here.json", "--torchrun", folder / "go.sh", "--script", "ranks.py found")
    assert code == 0, err
    done = subprocess.run(["bash", "go.sh"], cwd=folder, env=real_torchrun(folder), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert (folder / "found").read_text() == "[('0', '0'), ('0', '1')]"


@pytest.mark.slow
def test_the_script_trains_the_plan(folder: Path) -> None:
    """By ``autopar run`` on two ranks, as torchrun starts them."""
    code, _, err = command("launch", folder / "here.json", "--torchrun", folder / "start.sh")
    assert code == 0, err
    env = {**real_torchrun(folder), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(["bash", "start.sh"], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 processes on the CPU" in done.stdout and "predicted for local-x2" in " ".join(done.stdout.split())
