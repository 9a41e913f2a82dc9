"""Pieces that are not equal: sizes, rules on numbers, transfers, plans."""

from __future__ import annotations

import random
import warnings
from math import prod

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, GPT2Config, GPT2LMHeadModel

import autopar
import autopar.rules
from autopar.certificate import check
from autopar.planner.intra_op.mesh_plan import plan_graph
from autopar.planner.intra_op.pins.options import Options
from autopar.plans.transfer import Side, box_at, transfer
from autopar.rules.local_calls import cuts_of
from autopar.rules.proving.proof import Case, prove, strategies_of
from autopar.rules.registry import SAMPLES
from autopar.words.graph import Spec
from autopar.words.meshes import Mesh
from autopar.words.placements import State
from autopar.words.shards import box_of, divides, elements_moved, fits, lengths_of, local_shape, shard_of
from hardware_profiles import abstract_cluster, load_cluster

THREE = Mesh.of(data=3)
FIVE = Mesh.of(data=5)
SIX = Mesh.of(data=3, tensor=2)
EVERY = [(target, i) for target in sorted(SAMPLES) for i in range(len(SAMPLES[target]))]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_pieces_are_those_of_torch_chunk(size: int) -> None:
    for n in range(1, 30):
        x = torch.arange(n)
        mine = [x.narrow(0, *shard_of(n, size, at)) for at in range(size)]
        theirs = list(x.chunk(size))
        assert [p.tolist() for p in mine] == [p.tolist() for p in theirs] + [[]] * (size - len(theirs))


def test_pieces_of_pieces() -> None:
    """10 elements over 3 and then 2 ranks: 4, 4 and 2, of which 2 2, 2 2 and 1 1."""
    state = State.of("S0", "S0")
    shapes = [local_shape((10,), state, SIX, SIX.coordinate(rank)) for rank in range(6)]
    assert shapes == [(2,), (2,), (2,), (2,), (1,), (1,)] and local_shape((10,), state, SIX) == (2,)
    assert [box_of((10,), state, SIX, SIX.coordinate(rank))[0][0] for rank in range(6)] == [0, 2, 4, 6, 8, 9]
    assert elements_moved((10, 5), state, State.of("S0", "I"), SIX) == 4 * 5
    assert elements_moved((10, 5), State.of("S0", "I"), State.of("I", "I"), SIX) == 12 * 5
    moved = elements_moved((10, 5), State.of("S0", "I"), State.of("S1", "I"), SIX)
    assert moved == 4 * 6, "what is sent is padded on both dims"


def test_who_is_left_without_any() -> None:
    assert min(lengths_of(50257, [(8, 1)])) and min(lengths_of(10, [(4, 1)])) and not min(lengths_of(6, [(4, 1)]))
    assert not min(lengths_of(17, [(8, 1)])), "3 3 3 3 3 2 0 0"
    assert fits((50257, 8), State.of("S0", "S1"), SIX) and fits((6,), State.of("S0"), Mesh.of(a=4))
    assert not fits((3,), State.of("S0"), Mesh.of(a=4)) and not fits((3,), State.of("S1"), THREE)
    for n in range(1, 60):
        for sizes in ((2,), (3,), (5,), (2, 3), (3, 2), (2, 2, 2), (3, 2, 2)):
            mesh = Mesh((f"a{k}", size) for k, size in enumerate(sizes))
            state = State.of(*["S0"] * len(sizes))
            lengths = [local_shape((n,), state, mesh, mesh.coordinate(r))[0] for r in range(mesh.n_devices)]
            assert sum(lengths) == n and max(lengths) == local_shape((n,), state, mesh)[0]
            assert lengths_of(n, [(size, 1) for size in sizes]) == set(lengths), (n, sizes)
            assert divides((n,), state, mesh) == (n % prod(sizes) == 0)


@pytest.mark.parametrize("target, number", EVERY, ids=[f"{t.removeprefix('aten.')}-{i}" for t, i in EVERY])
def test_rules_on_three_ranks(target: str, number: int) -> None:
    """Every rule in every strategy on 3 ranks in which pieces are not equal."""
    case = Case(target, SAMPLES[target][number])
    for picked in strategies_of(case, THREE):
        if _is_uneven(case, picked, THREE):
            prove(case, picked, THREE)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh.of(data=4), FIVE, SIX], ids=["4", "5", "3x2"])
@pytest.mark.parametrize("target, number", EVERY, ids=[f"{t.removeprefix('aten.')}-{i}" for t, i in EVERY])
def test_rules_on_more_ranks(target: str, number: int, mesh: Mesh) -> None:
    """As above; 6 over 4 are 2, 2, 2, 0, and 8 over 5 are 2, 2, 2, 2, 0: some ranks have nothing."""
    case = Case(target, SAMPLES[target][number])
    for picked in strategies_of(case, mesh):
        if _is_uneven(case, picked, mesh):
            prove(case, picked, mesh)


@pytest.mark.parametrize(
    "target, number, factor",
    [
        ("aten.cross_entropy_loss.default", 2, "v"), ("aten.mean.dim", 0, "s"), ("aten.softmax.int", 1, "n"),
        ("aten.layer_norm.default", 1, "n0"), ("aten.batch_norm.default", 2, "b"), ("aten.embedding.default", 0, "v"),
        ("aten.mse_loss.default", 1, "b"), ("aten.scaled_dot_product_attention.default", 0, "h"),
    ],
)  # fmt: skip
def test_rules_where_a_rank_has_nothing(target: str, number: int, factor: str) -> None:
    """Means, maxima and statistics over no elements: the rules whose operators had to be guarded."""
    case = Case(target, SAMPLES[target][number])
    mesh = Mesh.of(data=next(n for n in (3, 5, 7) if not min(lengths_of(case.rule.sizes[factor], [(n, 1)]))))
    proved = [picked for picked in strategies_of(case, mesh) if picked[0].name == factor]
    assert proved
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*degrees of freedom.*")
        for picked in proved:
            prove(case, picked, mesh)


BLOCKS = (
    "reshape.default", "linear.default", "addmm.default", "layer_norm.default", "softmax.int", "embedding.default",
    "cross_entropy_loss.default", "mse_loss.default", "dropout.default", "scaled_dot_product_attention.default",
    "pixel_unshuffle.default", "repeat_interleave.self_int", "gelu.default",
)  # fmt: skip


@pytest.mark.parametrize(
    "target, number, mesh",
    [
        pytest.param(
            target, number, mesh, id=f"{target.removeprefix('aten.')}-{number}-{mesh.n_devices}",
            marks=() if target.removeprefix("aten.") in BLOCKS and mesh is THREE else pytest.mark.slow,
        )
        for target, number in EVERY for mesh in (THREE, Mesh.of(data=2, tensor=2))
    ],
)  # fmt: skip
def test_rules_in_blocks(target: str, number: int, mesh: Mesh) -> None:
    """Every strategy that cuts a factor into uneven blocks, of one element of ``(h d)`` or of two of any factor."""
    case = Case(target, SAMPLES[target][number])
    pairs = [(f, 2) for f in case.rule.in_blocks if case.rule.sizes[f] > 2 and case.rule.sizes[f] % 2 == 0]
    for picked in strategies_of(case, mesh, [*case.rule.blocks, *pairs]):
        if any("*" in option.name for option in picked):
            prove(case, picked, mesh)


def _is_uneven(case: Case, picked: tuple, mesh: Mesh) -> bool:
    pieces, _ = cuts_of(case.rule, picked, mesh)
    return any(case.rule.sizes[f] % n for f, n in pieces.items())


@pytest.mark.parametrize("seed", range(40))
def test_transfers_bring_every_element_once(seed: int) -> None:
    """From pieces of any sizes to pieces of any others: what arrives is the target's piece, each element one time."""
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))

    def side(first: int) -> Side:
        while True:
            mesh = Mesh((f"a{k}", rng.choice([1, 2, 3, 4])) for k in range(rng.randint(1, 2)))
            state = State.of(*(rng.choice(["I", *(f"S{d}" for d in range(len(shape)))]) for _ in mesh))
            if fits(shape, state, mesh):
                return Side(state, mesh, tuple(range(first, first + mesh.n_devices)))

    source, target = side(0), side(rng.choice([0, 20]))
    found = transfer(Spec(shape, "float32"), source, target)
    values = np.arange(prod(shape)).reshape(shape)
    for at, device in enumerate(target.devices):
        arrived = np.zeros(shape, dtype=int)
        for piece in found.pieces:
            if piece.target == device:
                part = tuple(slice(start, start + n) for start, n in piece.box)
                have = box_at(shape, source, source.devices.index(piece.source))
                inside = zip(piece.box, have, strict=True)
                assert all(a <= start and start + n <= a + length for (start, n), (a, length) in inside)
                arrived[part] += 1
        want = tuple(slice(s, s + n) for s, n in box_at(shape, target, at, found.landing))
        expected = np.zeros_like(values)
        expected[want] = 1
        assert (arrived == expected).all()


def test_gpt2_cuts_its_vocabulary() -> None:
    """50257 over 8: head and loss are cut along the vocabulary, and the plan is what the program does."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(
            n_layer=2, use_cache=False, attn_implementation="sdpa", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ))  # fmt: skip
        ids = torch.zeros(8, 1024, dtype=torch.int64)
    graph = autopar.capture(model, {"input_ids": ids, "labels": ids}).graph
    cluster, mesh = load_cluster("dgx-h100"), Mesh.of(tensor=8)
    rows = {"transformer.wte.weight": "S0"}  # along its width the embedding is as good, and no uneven piece
    plan = plan_graph(graph, cluster, mesh, Options(params=rows))
    ops = {node.target: plan.ops[node.name] for node in graph.nodes if node.kind == "op" and node.module == "lm_head"}
    assert ops == {"aten.linear.default": ("n",)}
    loss = next(node for node in graph.nodes if "cross_entropy" in node.target)
    assert plan.ops[loss.name] == ("v",)
    assert plan.params["transformer.wte.weight"].stored == State.of("S0")
    report = check(plan, graph, cluster)
    assert report.ok, report.failures


@pytest.mark.slow
def test_no_parameter_of_a_large_model_stays_whole() -> None:
    """A BLOOM of 176B on 24 devices, where memory binds: each device has its 24th of the weights, up to 0.1%."""
    with torch.device("meta"):
        config = BloomConfig(
            vocab_size=250880, hidden_size=14336, n_layer=70, n_head=112, use_cache=False, hidden_dropout=0.0,
            attention_dropout=0.0,
        )  # fmt: skip
        model = BloomForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(24, 2048, dtype=torch.int64)
    graph = autopar.capture(model, {"input_ids": ids, "labels": ids}).graph
    mesh = Mesh.of(data=24)
    cluster = abstract_cluster(mesh.size_of, alpha=(1e-5,), beta=(1e-11,))
    plan = plan_graph(graph, cluster, mesh, Options(memory_limit_bytes=442 * 2**30))
    sizes = {node.target: node.out.shape for _, node in graph.of_kind("param")}
    assert len(sizes) == 845 and not [name for name, choice in plan.params.items() if not choice.stored.is_cut]
    here = sum(prod(local_shape(sizes[name], choice.stored, mesh)) for name, choice in plan.params.items())
    assert here < 1.001 * sum(map(prod, sizes.values())) / 24
