"""Files that somebody else wrote: looking at them runs nothing, none takes for ever, and commands spare other files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import command_line
import mutated_inputs
import pytest
import torch

from autopar.capture import capture, untraceable_modules
from autopar.capture.trace import value_origins
from autopar.errors import AutoparError, CaptureError, MeshError, ModelError, PlanError
from autopar.frontends import hugging_face
from autopar.frontends.models import load_model
from autopar.planfile import parse
from autopar.plans.plan_options import BY_NAME
from autopar.runtime.ranks.launch import run_local
from autopar.words.meshes import Mesh
from cost_models.schedules import build
from hardware_profiles import ProfileError, abstract_cluster, build_cluster, load_cluster


def command(*words: object) -> tuple[int, str, str]:
    """Exit code, standard output, and standard error in one line."""
    code, out, err = command_line.command(*words)
    return code, out, " ".join(err.split())


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``models.py``, which notes that it was imported, and plans of it."""
    folder = tmp_path_factory.mktemp("strangers")
    with contextlib.chdir(folder):
        mutated_inputs.made_plans()
        text = Path("models.py").read_text()
        Path("models.py").write_text(f"open({str(folder / 'ran')!r}, 'a').write('x')\n{text}")
    return folder


@pytest.fixture(autouse=True)
def _inside(plans: Path) -> Iterator[None]:
    with contextlib.chdir(plans):
        Path("ran").unlink(missing_ok=True)
        yield


LOOKING = (
    ("show", "plan.json"), ("show", "pipe.json", "--json"), ("show", "plan.json", "--code"),
    ("explain", "plan.json", "layers.0.up"), ("explain", "pipe.json", "stage:1"), ("diff", "plan.json", "plan.json"),
    ("diff", "plan.json", "pipe.json"), ("simulate", "pipe.json"), ("report", "plan.json", "-o", "page.html"),
    ("report", "plan.json", "-o", "page.html", "--top", "2"), ("check", "plan.json"),
)  # fmt: skip


@pytest.mark.parametrize("words", LOOKING, ids=" ".join)
def test_looking_at_a_plan_runs_nothing(words: tuple[str, ...]) -> None:
    code, out, err = command(*words)
    assert not Path("ran").exists()
    assert "--trust" in out + err and "--model models.py:make" in out + err
    assert code == (0 if words[0] == "diff" or (words[:2] in (("show", "plan.json"), ("show", "pipe.json"))
                    and "--code" not in words) else 2)  # fmt: skip


def test_what_the_user_trusts_or_names_runs(tmp_path: Path) -> None:
    for words in (("show", "plan.json", "--trust"), ("check", "plan.json", "--model", "models.py:make")):
        Path("ran").unlink(missing_ok=True)
        code, _, err = command(*words)
        assert code == 0 and Path("ran").exists(), err
    Path("ran").unlink()
    code, _, err = command("check", "plan.json", "--model", "")
    assert code == 2 and not Path("ran").exists(), "an empty name is not that of the plan"
    there = os.path.relpath("plan.json", tmp_path)
    with contextlib.chdir(tmp_path):
        code, _, err = command("check", there)
    assert f"--model {Path(there).parent}/models.py:make" in err, "as the user would write it, from here"


def test_a_config_needs_no_trust(tmp_path: Path) -> None:
    """It is read, and what it would have transformers fetch and run is left out, in parts of it, too."""
    config = {**mutated_inputs.CONFIG, "auto_map": {"AutoModel": "evil--modeling.Evil"},
              "attn_implementation": "evil/kernel"}  # fmt: skip
    Path("config.json").write_text(json.dumps(config))
    words = ("hf:config.json", "--batch", "2", "--seq", "8", "-c", "local-x2", "--mesh", "data=2", "-o", "hf.json")
    assert command("plan", *words)[0] == 0
    assert command("check", "hf.json")[0] == 0
    Path("hf.json").unlink()


# --- what is written --------------------------------------------------------------------------------------------------

PLANNING = ("plan", "models.py:make", "-c", "local-x2", "--mesh", "data=2")
WRITING = {
    "plan": (*PLANNING, "-o"),
    "like": ("plan", "models.py:make", "-c", "local-x2", "--like", "dp=2", "--like-output"),
    "report": ("report", "plan.json", "--trust", "-o"),
    "profile": ("profile", "models.py:make", "-o"),
}


@pytest.mark.parametrize("what", WRITING)
def test_other_files_are_spared(what: str, tmp_path: Path) -> None:
    others = {
        "model.json": "import torch\n", "data.json": '{"tool": "autopar_plan"}\n', "other.json": "<!doctype html>\n",
        "bytes.json": "",
        **({} if what in ("plan", "like") else {"p.json": Path("plan.json").read_text()}),
        **({} if what == "profile" else {"m.json": json.dumps(mutated_inputs.PROFILE)}),
    }  # fmt: skip
    for name, text in others.items():  # no text at all stands for bytes that are none
        (tmp_path / name).write_bytes(text.encode() or b"\xff\xfe")
        before = (tmp_path / name).read_bytes()
        code, _, err = command(*WRITING[what], tmp_path / name)
        assert code == 2 and "--force" in err and str(tmp_path / name) in err
        assert (tmp_path / name).read_bytes() == before
    for target in ("aim.json", "absent.json"):
        (tmp_path / "aim.json").write_text(Path("plan.json").read_text())
        (tmp_path / "link.json").unlink(missing_ok=True)
        (tmp_path / "link.json").symlink_to(tmp_path / target)
        code, _, err = command(*WRITING[what], tmp_path / "link.json")
        assert code == 2 and "links are not followed" in err
        assert (tmp_path / "link.json").is_symlink() and not (tmp_path / "absent.json").exists()


def test_a_plan_is_written_over_a_plan(tmp_path: Path) -> None:
    """Also over one with a mistake in it, over nothing, and over anything by ``--force``, which follows no link."""
    plan = tmp_path / "p.json"
    texts = ('{"autopar_plan": 2, edited', "", '{"autopar_pipeline": 1}')
    for text in texts:
        plan.write_text(text)
        code, _, err = command(*PLANNING, "-o", plan)
        assert code == 0, err
        assert json.loads(plan.read_text())["autopar_plan"] == 2
    plan.write_text("x = 1\n")
    (tmp_path / "link.json").symlink_to(plan)
    assert command(*PLANNING, "-o", tmp_path / "link.json", "--force")[0] == 0
    assert plan.read_text() == "x = 1\n" and not (tmp_path / "link.json").is_symlink()
    assert command(*PLANNING, "-o", plan, "--force")[0] == 0
    assert "autopar_plan" in plan.read_text()
    assert command(*PLANNING, "-o", "/dev/null")[0] == 0
    for _ in range(2):
        code, _, err = command("report", plan, "--model", "models.py:make", "-o", tmp_path / "page.html")
        assert code == 0, err


def test_a_trace_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "absent.json")
    code, _, err = command("simulate", "pipe.json", "--trust", "--trace", tmp_path / "link.json")
    assert code == 2 and "links are not followed" in err and not (tmp_path / "absent.json").exists()
    for name in ("9" * 5_000, "a\0b", "absent/trace.json"):
        code, _, err = command("simulate", "pipe.json", "--trust", "--trace", name)
        assert code == 2 and "--trace" in err


# --- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["²", "٣", "9" * 5_000, "16777217", "1.5", "-1", ""])
def test_counts_are_digits(text: str) -> None:
    stages, parts = (BY_NAME[name].flags[0].read for name in ("stages", "microbatches"))
    for read in (stages, parts, lambda text: Mesh.parse(f"data={text}"), lambda text: build(f"zb-h1:{text}", 2, 2, 2)):
        with pytest.raises(ValueError, match=r"number|axis=size|sizes are 1|largest count") as error:
            read(text)
        assert len(str(error.value)) < 400
    assert stages("3") == 3 and parts("4,8") == [4, 8]


def test_what_is_too_much_is_refused_at_once() -> None:
    for name in ("local-x65537", "dgx-h100-x8193", "dgx-h100-x8192+dgx-a100", "local-x" + "9" * 500):
        with pytest.raises(ProfileError, match=r"at most 65,536|largest count|expected at most"):
            load_cluster(name)
    for name in ("local-x2@0-99999999", "local-x2@" + ",".join(["0-60000"] * 90), "local-x2" + "@0" * 900):
        with pytest.raises(ProfileError, match=r"no cluster has ranks|largest count|names ranks twice"):
            load_cluster(name)
    with pytest.raises(ProfileError, match="no name or path is so long"):
        load_cluster("x" * 10_000_000)
    with pytest.raises(ProfileError, match="more than 65,536 devices"):
        abstract_cluster({f"a{k}": 60_000 for k in range(1_000)})
    links = [{"from": 0, "to": 0, "link": "pcie4"}] * 100
    with pytest.raises(ProfileError, match=r"makes 6,000,000 links"):
        build_cluster({"node": [{"device": "L4", "count": 60_000, "link": links}]}, "it")
    with pytest.raises(ValueError, match="2,000,000 forwards a step, at most 262,144"):
        build("1f1b", 2, 2, 1_000_000)
    with pytest.raises(MeshError, match="100,000 axes, at most 16"):
        Mesh.parse(",".join(f"a{k}=1" for k in range(100_000)))


def test_a_file_that_is_wrong_everywhere_is_told_briefly() -> None:
    raw = json.loads(Path("plan.json").read_text())
    raw["stages"][0]["params"] = {f"p{k}": 7 for k in range(90_000)}
    with pytest.raises(PlanError, match="more than 40 problems") as error:
        parse(json.dumps(raw))
    assert len(str(error.value)) < 10_000
    raw["stages"][0]["params"] = {f"p{k}": {} for k in range(200_000)}
    with pytest.raises(PlanError, match="has 200,000 entries, at most 100,000"):
        parse(json.dumps(raw))
    nodes = {"node": [{"device": f"no{k}"} for k in range(50_000)]}
    with pytest.raises(ProfileError, match="more than 20 problems"):
        build_cluster(nodes, "it")


@pytest.mark.parametrize("edit", [
    {"peak_flops": {"floot32": 1e12}}, {"peak_flops": {"float32": 1e12, "bf16": 1e12}},
    {"peak_flops": {"float32": 1e12, "Float64": 1e12}},
])  # fmt: skip
def test_formats_of_a_device_are_known(edit: dict[str, object]) -> None:
    document = json.loads(json.dumps(mutated_inputs.CLUSTER))
    build_cluster(document, "it")
    document["devices"]["own"].update(edit)
    with pytest.raises(ProfileError, match="is no format with a rate"):
        build_cluster(document, "it")


@pytest.mark.parametrize(("at", "value"), [
    (("ops", "aten.relu.default(float32[8 32]*)", "forward_seconds"), 1e300),
    (("overheads", "step_seconds"), 1e-320), (("corrections", "other", "forward"), [1e-5, 1e200]),
    (("transfers", "all_reduce"), [[1024, 1e-5], [1e200, 1.0]]),
])  # fmt: skip
def test_numbers_of_a_profile_can_be_multiplied(at: tuple[str, ...], value: object) -> None:
    document = json.loads(json.dumps(mutated_inputs.PROFILE))
    Path("p.json").write_text(json.dumps(document))
    load_cluster("p.json")
    *above, key = at
    table = document
    for name in above:
        table = table[name]
    table[key] = value
    Path("p.json").write_text(json.dumps(document))
    with pytest.raises(ProfileError, match="expected"):
        load_cluster("p.json")


# --- models -----------------------------------------------------------------------------------------------------------


class Scripted(torch.nn.Module):
    """Calls a compiled function, or holds a compiled module."""

    def __init__(self, inner: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _doubled(self.inner(x)).sum()


def _double(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


_doubled = torch.jit.script(_double)


def test_modules_of_torch_jit_are_refused_and_functions_traced() -> None:
    x = torch.zeros(2, 4)
    for inner, path in ((torch.jit.script(torch.nn.Linear(4, 4)), "'inner'"),
                        (torch.jit.trace(torch.nn.Linear(4, 4), x), "'inner'")):  # fmt: skip
        for model, where in ((Scripted(inner), path), (inner, "the model")):
            with pytest.raises(CaptureError, match=f"{where} is a .* of torch.jit"):
                capture(model, (x,))
    graph = capture(Scripted(), (x,)).graph
    assert graph.loss == 0, "the loss has its gradient through the function"


class Endless(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while True:
            x = x + 1


def test_a_forward_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untraceable_modules, "MOST_OPERATORS", 300)
    with pytest.raises(CaptureError, match="more than 300 operators"):
        capture(Endless(), (torch.zeros(2),))
    with pytest.raises(CaptureError, match="'stack' holds 5,000 modules, at most 4,096"):
        capture(torch.nn.ModuleDict({"stack": torch.nn.ModuleList([torch.nn.ReLU()] * 5_000)}), (torch.zeros(2),))


class Positions(torch.nn.Module):
    """Asks whether positions rise, as masks of packed documents do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[0] * 1000).view(x.shape[0], 1000)
        return x.sum() if (positions[:, 1:] > positions[:, :-1]).all() else x.mean()


def test_large_constants_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    capture(Positions(), (torch.zeros(4, 4),))
    monkeypatch.setattr(value_origins, "MOST_ELEMENTS", 1000)
    with contextlib.suppress(CaptureError):
        assert capture(Positions(), (torch.zeros(4, 4),)).graph.ways, "a branch on data: its value is not known"


@pytest.mark.parametrize("change", [
    {"model_type": []}, {"model_type": 7}, {"model_type": {}}, {"architectures": 5}, {"architectures": [5]},
    {"architectures": {"a": 1}}, {"architectures": ["logging"]}, {"hidden_act": [1]}, {"torch_dtype": 5},
    {"torch_dtype": "int64"}, {"num_hidden_layers": "2"}, {"vocab_size": 10**18},
])  # fmt: skip
def test_configs_of_the_wrong_types(change: dict[str, object]) -> None:
    Path("wrong.json").write_text(json.dumps({**mutated_inputs.CONFIG, **change}))
    with pytest.raises(ModelError, match=r"model 'hf:wrong.json': "):
        load_model("hf:wrong.json", 2, 8)


def test_configs_of_far_too_many_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "MOST_MODULES", 500)
    Path("wrong.json").write_text(json.dumps({**mutated_inputs.CONFIG, "num_hidden_layers": 10**9}))
    with pytest.raises(ModelError, match="more than 500 modules"):
        load_model("hf:wrong.json", 2, 8)


@pytest.mark.parametrize("text", [
    "import sys\nsys.exit(0)\n", "def make():\n    raise SystemExit(0)\n", "def make():\n    exit()\n",
])  # fmt: skip
def test_a_file_that_ends_the_process(text: str) -> None:
    Path("ends.py").write_text(text)
    with pytest.raises(ModelError, match="raised SystemExit"):
        load_model("ends.py:make")


# --- what is given twice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "number", "texts"), [
    ("constraints", 0, ["up:data=n", "up:data=k"]), ("constraints", 0, ["up:data=n", "down:data=n", "up:data=n"]),
    ("params", 0, ["*.weight", "*.weight"]), ("params", 1, ["a=S0", "b=S0", "a=I"]),
    ("placements", 0, ["x=S0", "x=R"]), ("placements", 1, ["0=I", "0=I"]),
])  # fmt: skip
def test_given_twice(name: str, number: int, texts: list[str]) -> None:
    with pytest.raises(AutoparError, match="is given twice"):
        BY_NAME[name].flags[number].read(texts)


@pytest.mark.parametrize("pins", [
    ("--keep-replicated", "*.weight", "--pin-param", "layers.0.up.weight=S0"),
    ("--pin-param", "*=S0", "--keep-replicated", "*.norm.*"), ("--keep-replicated", "*", "--pin-param", "*=S0"),
])  # fmt: skip
def test_one_parameter_by_two_options(pins: tuple[str, ...]) -> None:
    code, _, err = command(*PLANNING, *pins)
    assert code == 2 and "is named by --keep-replicated" in err


def test_parameters_of_their_own_by_two_options() -> None:
    code, _, err = command(*PLANNING, "--keep-replicated", "*.norm.*", "--pin-param", "*.up.weight=S0")
    assert code == 0, err


# --- ranks ------------------------------------------------------------------------------------------------------------


def _listening() -> list[str]:
    """The addresses on which this process and its parent accept connections."""
    import torch.distributed as dist

    dist.barrier()
    found = []
    for pid in (os.getpid(), int(os.environ["STARTER"])):
        links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
        for kind in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == "0A" and f"socket:[{rest[5]}]" in links:
                    found.append(local.partition(":")[0])
    dist.barrier()
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ranks_listen_on_loopback_only() -> None:
    results = run_local(_listening, 1, env={"STARTER": str(os.getpid())})
    assert results[0] and set(results[0]) == {"0100007F"}
