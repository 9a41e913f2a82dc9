"""Families of models, captured on one batch and compared with eager mode on another, with other padding and labels.

Loss, every gradient and the running statistics after one training step of the captured graph on one device. What is
captured is cut by the same rules as everything else (:mod:`test_same_numbers`); here the question is what capture makes
of other people's code. Families that are refused are listed with the error, and do not count.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
from zoo import ZOO, loss_of
from zoo_plain import PLAIN
from zoo_wide import SINGLE, WIDE

from autopar.capture import capture
from autopar.comparison.in_process_ranks import run_step
from autopar.comparison.program_vs_eager import inputs_of, one_device, state_of, verify
from autopar.errors import CaptureError
from autopar.lower.emit import lower
from autopar.words.meshes import Mesh
from hardware_profiles import load_cluster

QUICK = {
    *list(PLAIN)[::4], "mbart", "swin", "mamba", "deberta_v2", "deepseek_v3", "switch", "wav2vec2_ctc",
}  # fmt: skip
"""Every fourth plain one and one of each kind; all of them are tried by ``make zoo`` and `-m slow`."""
BRANCH = "branches on the value of a tensor"
REFUSED = {
    "reformer": BRANCH,  # whether anything is masked; without a mask its backward draws random numbers
}
"""Families with a clear error, and what it says; most have another call beside it that is captured."""

TODAY: dict[str, str] = {}


def _marks(name: str) -> list[pytest.MarkDecorator]:
    slow = [] if name in QUICK else [pytest.mark.slow]
    return [*slow, pytest.mark.xfail(strict=True, reason=TODAY[name])] if name in TODAY else slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in WIDE])
def test_second_batch_is_as_in_eager_mode(name: str) -> None:
    case = WIDE[name]()
    if name in REFUSED:
        with pytest.raises(CaptureError, match=f"(?s){REFUSED[name]}"):
            capture(case.model, case.args, case.kwargs)
        return
    model, (args, kwargs) = copy.deepcopy(case.model), case.batch2
    captured = capture(case.model, case.args, case.kwargs)
    graph, (weights, buffers) = captured.graph, state_of(captured, case.model)
    plan = one_device(graph)
    done = run_step(graph, plan, lower(graph, plan), weights, buffers, inputs_of(captured, args, kwargs))

    loss = loss_of(model(*args, **kwargs))
    loss.backward()
    tolerance = 1e-4 if name in SINGLE else 1e-8
    assert torch.isfinite(loss)
    torch.testing.assert_close(done.outputs[graph.loss], loss.detach(), rtol=tolerance, atol=tolerance)
    params = dict(model.named_parameters(remove_duplicate=False))
    largest = max(p.grad.abs().max() for p in params.values() if p.grad is not None)
    assert largest > 1e-6, "this would prove little"
    for parameter, tensor in params.items():
        mine, theirs = done.gradients.get(graph.tied.get(parameter, parameter)), tensor.grad
        mine, theirs = (torch.zeros_like(tensor) if g is None else g for g in (mine, theirs))
        assert (mine - theirs).abs().max() <= tolerance * (theirs.abs().max() + 1e-3 * largest), parameter
    after = dict(model.named_buffers(remove_duplicate=False))
    for buffer, value in {**dict(case.model.named_buffers()), **done.buffers}.items():
        if buffer in after:
            torch.testing.assert_close(value, after[buffer], rtol=tolerance, atol=tolerance, msg=buffer)


def test_there_are_sixty_families() -> None:
    alike = {"bert_masked", "unet_upsample"}  # to others
    assert len(({*ZOO} - alike) | ({*WIDE} - {*REFUSED} - {*TODAY})) >= 60


def test_padding_and_labels_differ_between_batches() -> None:
    for name, make in WIDE.items():
        if name in QUICK:
            case = make()
            first = [x for x in [*case.args, *case.kwargs.values()] if isinstance(x, torch.Tensor)]
            second = [x for x in [*case.batch2[0], *case.batch2[1].values()] if isinstance(x, torch.Tensor)]
            assert [x.shape for x in first] == [x.shape for x in second]
            assert not any(torch.equal(a, b) for a, b in zip(first, second)), name


def test_refusals_are_of_families() -> None:
    assert {*REFUSED, *TODAY, *QUICK} <= {*WIDE}
    assert all(re.compile(pattern) for pattern in REFUSED.values())


def test_pieces_that_are_added_by_index_to_a_pending_sum_pass_the_type_checker() -> None:
    """Every cut of the messages of a graph network was refused by ``autopar verify``: a false alarm."""
    case = WIDE["message_passing"]()
    captured = capture(case.model, case.args, case.kwargs)
    cluster, mesh = load_cluster("local-x2"), Mesh.of(tensor=2)
    for found in verify(captured, case.model, case.args, case.kwargs, mesh, cluster, random_plans=3):
        assert found.worst < 1e-9, found
