"""The search over everything: the smallest and largest numbers of microbatches, meshes of three axes, any degree of
interleaving, an end by Ctrl-C, and what is said when nothing fits."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from meta_models import gpt2_in_parts

from autopar.errors import InfeasibleError
from autopar.planner.inter_op.candidates import PipelineOptions
from autopar.planner.inter_op.per_microbatch_count import OneNumber
from autopar.planner.inter_op.stage_search import INTERRUPTED, plan_pipeline
from autopar.planner.intra_op.mesh_plan import Options
from autopar.words.graph import Graph
from hardware_profiles import load_cluster

BATCH = 64


@cache
def graphs(layers: int = 16, hidden: int = 4096) -> dict[int, Graph]:
    """GPT-2 blocks of a large model, by number of microbatches of a batch of 64 sequences."""
    return gpt2_in_parts(BATCH, 1024, torch.bfloat16, vocab_size=51200, n_embd=hidden, n_layer=layers, n_head=32)


CLUSTER = "dgx-a100-x4"


@pytest.mark.slow
def test_no_pinned_number_schedule_or_degree_beats_the_search() -> None:
    cluster, every = load_cluster(CLUSTER), graphs()
    best = plan_pipeline(every, cluster, 32, PipelineOptions(1)).plan.seconds
    for m, groups, schedule in ((64, 8, "zb-h1:1"), (64, 4, "1f1b"), (16, 8, "interleaved-1f1b:2"), (32, 4, "zb-h1:4"),
                                (1, 1, "1f1b"), (2, 2, "1f1b"), (64, 2, "zb-v")):  # fmt: skip
        try:
            asked = PipelineOptions(m, groups=groups, schedules=(schedule,))
            pinned = plan_pipeline(every[m], cluster, 32, asked).plan.seconds
        except InfeasibleError:
            continue
        assert best <= 1.01 * pinned, (m, groups, schedule)


@pytest.mark.slow
def test_nothing_fits_says_what_was_tried_and_what_would_do() -> None:
    asked = PipelineOptions(1, options=Options(memory_limit_bytes=0.5 * 2**30))
    some = {m: graph for m, graph in graphs().items() if m in (1, 64)}
    with pytest.raises(InfeasibleError) as error:
        plan_pipeline(some, load_cluster(CLUSTER), 8, asked)
    said = str(error.value)
    assert "no plan fits 512.00 MiB per device; tried: any number of groups of 8 devices, 1, 64 microb" in said
    assert "the leanest, " in said and "of these" in said


def test_an_interrupted_search_keeps_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    real = OneNumber.candidates

    def candidates(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        if len(looked) == 2:
            raise KeyboardInterrupt
        looked.append(self.request.microbatches)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(OneNumber, "candidates", candidates)
    found = plan_pipeline(graphs(), load_cluster(CLUSTER), 32, PipelineOptions(1, groups=4, schedules=("1f1b",)))
    assert found.plan.microbatches in looked and INTERRUPTED in found.plan.notes
    looked += [0, 0]
    monkeypatch.setattr(OneNumber, "candidates", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        plan_pipeline(graphs(), load_cluster(CLUSTER), 32, PipelineOptions(1, groups=4, schedules=("1f1b",)))
