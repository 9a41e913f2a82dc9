"""Cutting a graph into stages changes no number: every stage on one device, chained by autograd."""

from __future__ import annotations

import random

import pytest
import torch
from procs.in_turn import marked
from zoo import ZOO

from autopar.capture import Captured, capture
from autopar.comparison import program_vs_eager as V
from autopar.errors import PlanError
from autopar.lower.emit import lower
from autopar.plans.stage_graphs import cut, hot_ops, spans_of_written_buffers
from autopar.words.graph import Graph


def run(captured: Captured, stages: list[Graph], starts: list[str], weights: dict, buffers: dict, inputs: dict):  # type: ignore[no-untyped-def, type-arg]
    """Loss and gradients of the stages in turn, and the new buffers."""
    made: dict[str, torch.Tensor] = {}
    outputs: dict[int, torch.Tensor] = {}
    changed = dict(buffers)
    for stage in cut(captured.graph, starts):
        program = lower(stage.graph, V.one_device(stage.graph))
        known = {"param": weights, "buffer": buffers, "input": {**inputs, **made}}
        values = [torch.tensor(7) if s.kind == "seed" else known[s.kind][s.name] for s in program.slots]
        flat = program.module(*values)
        made.update(zip((stage_edge.tensor for stage_edge in stage.gives), flat, strict=False))
        outputs.update(zip(stage.outputs, flat[len(stage.gives) :], strict=False))
        changed.update(zip(program.updates, flat[len(program.outputs) :], strict=True))
    loss = outputs[captured.graph.loss]  # type: ignore[index]
    names = [n for n, w in weights.items() if w.requires_grad]
    return loss, dict(zip(names, torch.autograd.grad(loss, [weights[n] for n in names], allow_unused=True))), changed


RESEMBLE = ("bert_masked", "mistral", "opt", "vit", "llama", "whisper", "unet_upsample")


@pytest.mark.parametrize("name", marked(sorted(ZOO), RESEMBLE))
def test_stages_compute_what_the_model_does(name: str) -> None:
    case = ZOO[name]()
    captured = V.promoted(capture(case.model, case.args, case.kwargs))
    weights, buffers = V.state_of(captured, case.model)
    weights, buffers = V.doubled(weights), V.doubled(buffers)
    inputs = V.doubled(V.inputs_of(captured, case.args, case.kwargs))
    reference = run(captured, [], [], weights, buffers, inputs)
    ops = [captured.graph.nodes[i].name for i in hot_ops(captured.graph)]
    rng = random.Random(name)
    for n in (2, 3, 5):
        starts = [ops[p] for p in sorted(rng.sample(range(1, len(ops)), n - 1))]
        try:
            stages = cut(captured.graph, starts)
        except PlanError as error:
            assert "is changed in stage" in str(error), error
            continue
        names = [node.name for s in stages for node in s.graph.nodes if node.kind == "op" and node.hot]
        assert names == ops, "every operator stands in one stage"
        loss, gradients, changed = run(captured, [], starts, weights, buffers, inputs)
        assert torch.equal(loss, reference[0])
        for key, want in reference[1].items():
            assert (want is None) == (gradients[key] is None), key
            if want is not None:
                torch.testing.assert_close(gradients[key], want, rtol=1e-12, atol=1e-12)
        for key, want in reference[2].items():
            assert torch.equal(changed[key], want), key


def test_bad_cuts() -> None:
    graph = capture(*(lambda c: (c.model, c.args, c.kwargs))(ZOO["mlp"]())).graph
    ops = [graph.nodes[i].name for i in hot_ops(graph)]
    with pytest.raises(PlanError, match="'nothing', which is no operator"):
        cut(graph, ["nothing"])
    with pytest.raises(PlanError, match="every stage needs at least one"):
        cut(graph, [ops[2], ops[1]])
    with pytest.raises(PlanError, match="every stage needs at least one"):
        cut(graph, [ops[0]])


class SharedNorm(torch.nn.Module):
    """Two linear layers behind which one batch norm stands."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 4)
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(self.norm(self.first(x))))).square().mean()


def test_calls_that_write_the_same_running_statistics_stay_in_one_stage() -> None:
    """Each stage would have running statistics of its own: what all but the last one write would be lost."""
    graph = capture(SharedNorm(), (torch.randn(4, 6),)).graph
    ops = [graph.nodes[i].name for i in hot_ops(graph)]
    norms = [p for p, name in enumerate(ops) if name.startswith("batch_norm")]
    assert len(norms) == 2 and tuple(norms) in spans_of_written_buffers(graph)
    for p in range(norms[0] + 1, norms[1] + 1):
        with pytest.raises(PlanError, match=r"norms in stages \[0, 1\] write the running .* 'norm.running_mean'"):
            cut(graph, [ops[p]])
    assert len(cut(graph, [ops[norms[1] + 1]])) == 2
