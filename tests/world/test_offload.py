"""Activations in the memory of the host: planned to the byte, one device's numbers, copied beside compute."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import stand_in
import torch
from recorded_kernels import RecordedKernels
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import planfile
from autopar.certificate import check
from autopar.certificate.peak import peak_of
from autopar.comparison import program_vs_eager
from autopar.errors import InfeasibleError, PlanError, RunError
from autopar.lower.host_copies import BUFFERS, HostBuffers
from autopar.profiling.by_kind import peak_bytes
from autopar.report.plan_in_words import plan_in_words
from cost_models.host_link import Moved, copy_waits

WIDTH, ROWS, BLOCKS = 32, 1024, 4


def net(blocks: int = BLOCKS) -> nn.Module:
    torch.manual_seed(0)
    width = WIDTH
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
                           for _ in range(blocks)))  # fmt: skip


@pytest.fixture(scope="module")
def case() -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    model, batch = net(), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    captured = autopar.capture(model, batch[:1], loss_fn=nn.functional.mse_loss, targets=batch[1:])
    return model, batch, captured


def worst(model: nn.Module, captured: Any, batch: Any, stage: Any) -> float:
    state = *program_vs_eager.state_of(captured, model), program_vs_eager.inputs_of(captured, batch, {})
    alone = program_vs_eager.train(captured, program_vs_eager.one_device(captured.graph), *state)
    return program_vs_eager.compare("offloaded", program_vs_eager.train(captured, stage, *state), alone).worst


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("rate", [stand_in.FAST, 1e9])
def test_a_limit_is_met_by_moving_results(case: Any, n: int, rate: float) -> None:
    """The counted peak and the recounted seconds are the plan's; the numbers are one device's."""
    model, batch, captured = case
    cluster = stand_in.stand_in(n, rate)
    free = autopar.plan(model, cluster, batch[:1], mesh=f"tensor={n}", captured=captured, offload="auto")
    assert not free.memory
    limit = int(0.75 * free.price.memory_bytes)
    plan = autopar.plan(
        model, cluster, batch[:1], mesh=f"tensor={n}", captured=captured, offload="auto", recompute="none",
        memory_limit=limit,
    )  # fmt: skip
    (stage,) = plan.stages
    assert plan.memory["offload"] and plan.price.memory_bytes <= limit
    assert peak_of(stage, captured.graph).n_bytes == plan.price.memory_bytes
    report = check(stage, captured.graph, cluster)
    assert report.ok, report.failures
    assert worst(model, captured, batch, stage) < 1e-6


def test_modules_are_named(case: Any, tmp_path: Any) -> None:
    """All results of the modules that match are moved, whatever that costs; the plan file has them and the request."""
    model, batch, captured = case
    plan = autopar.plan(model, stand_in.stand_in(), batch[:1], mesh="data=1", captured=captured,
                        offload={"activations": ["0", "1.0"]})  # fmt: skip
    assert set(plan.memory["offload"]) == {"tanh", "linear_1"}  # nobody keeps linear_2
    assert plan.pins.offload == "activations=0,activations=1.0"
    planfile.save(tmp_path / "plan.json", plan, captured.graph)
    loaded = planfile.load(tmp_path / "plan.json", captured.graph)
    assert loaded.stages[0].memory == plan.memory and loaded.pins == plan.pins


def test_what_cannot_be_moved_is_refused(case: Any) -> None:
    model, batch, captured = case
    with pytest.raises(PlanError, match="a process on a CPU lives in the host's memory already"):
        autopar.plan(model, "local-x1", batch[:1], mesh="data=1", captured=captured, offload="auto")
    with pytest.raises(PlanError, match=r"offload 'blocks.*' matches no module"):
        autopar.plan(model, stand_in.stand_in(), batch[:1], mesh="data=1", captured=captured,
                     offload="activations=blocks.*")  # fmt: skip


def test_a_host_without_room_is_refused(case: Any) -> None:
    model, batch, captured = case
    cluster = stand_in.stand_in()
    (device,) = set(cluster.devices)
    small = dataclasses.replace(device, host=dataclasses.replace(device.host, memory_bytes=1e6))
    with pytest.raises(InfeasibleError, match=r"moves 2.50 MiB .* has 976.56 KiB"):
        autopar.plan(model, dataclasses.replace(cluster, devices=(small,)), batch[:1], mesh="data=1", captured=captured,
                     offload="activations=*")  # fmt: skip


def moved_plan(case: Any) -> Any:
    model, batch, captured = case
    plan = autopar.plan(model, stand_in.stand_in(), batch[:1], mesh="data=1", captured=captured,
                        offload="activations=*")  # fmt: skip
    return plan


def test_copies_run_one_after_another(case: Any) -> None:
    """On a link that is far slower than the computation: the same numbers, and each result leaves and comes once."""
    model, batch, captured = case
    (stage,) = moved_plan(case).stages
    alone = worst(model, captured, batch, stage)
    with stand_in.slow_link(3e8) as (out, back, trace):
        assert worst(model, captured, batch, stage) == alone
    for copies in (out, back):
        spans = [span for span in trace if span.what == copies.what]
        assert len(spans) == 2 * len(stage.memory["offload"])  # of two steps
        assert all(a.end <= b.begin for a, b in itertools.pairwise(spans))
    assert out.waited > 0 < back.waited


@pytest.mark.parametrize("share", [0.9, 3.0])
def test_copies_hide_where_the_link_is_faster_than_the_computation(share: float) -> None:
    """On a clock: a link that needs less than the products between the results is never waited for; a slower one is.

    Of 18 blocks every sixth moves its results: their copies have five blocks of products to hide behind.
    """
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "targets": batch[1:]}
    cluster, flops = stand_in.stand_in(), 1e9
    model = net(18)
    plan = autopar.plan(model, cluster, batch[:1], mesh="data=1", **options,
                        offload={"activations": ["0", "6", "12"]})  # fmt: skip
    pm = autopar.parallelize(model, cluster=cluster, example_inputs=batch[:1], plan=plan, **options)
    block = 2 * 2 * ROWS * WIDTH * 4 * WIDTH / flops
    n_bytes = 4 * ROWS * WIDTH * (4 + 1)  # of tanh and of the second product
    with stand_in.timed_link(n_bytes / (share * 5 * block), flops) as (out, back, clock):
        pm.train_step(*batch)
    copies = [span for span in clock.trace if span.what != "compute"]
    assert len(copies) == 2 * len(plan.memory["offload"]) == 12
    beside = sum(
        max(0.0, min(span.end, other.end) - max(span.begin, other.begin))
        for span in copies for other in clock.trace if other.what == "compute"
    )  # fmt: skip
    spent = sum(span.end - span.begin for span in copies)
    if share < 1:
        assert out.waited == back.waited == 0.0 and beside == pytest.approx(spent)
    else:
        assert out.waited > 0 < back.waited and beside < spent


def test_buffers_are_used_again(case: Any) -> None:
    model, batch, captured = case
    (stage,) = moved_plan(case).stages
    worst(model, captured, batch, stage)
    before = BUFFERS.n_bytes
    worst(model, captured, batch, stage)
    assert BUFFERS.n_bytes == before > 0


def test_a_graph_that_is_kept_gives_the_same_gradients_twice(case: Any, as_a_step: bool = False) -> None:
    _, batch, _ = case
    pm = autopar.parallelize(net(), "data=1", batch[:1], loss_fn=nn.functional.mse_loss, targets=batch[1:],
                             plan=moved_plan(case))  # fmt: skip
    if as_a_step:
        pm.compile(backend="eager")
    loss = pm(*batch)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in pm.parameters()]
    loss.backward()
    assert all(torch.equal(2 * a, p.grad) for a, p in zip(once, pm.parameters(), strict=True))
    with pytest.raises(RuntimeError):
        loss.backward()
    with torch.no_grad():
        assert pm(*batch).item() == loss.item()  # nothing leaves without a backward


def test_a_graph_that_is_dropped_gives_its_buffers_back(case: Any) -> None:
    _, batch, _ = case
    pm = autopar.parallelize(net(), "data=1", batch[:1], loss_fn=nn.functional.mse_loss, targets=batch[1:],
                             plan=moved_plan(case))  # fmt: skip
    pm(*batch)
    before = BUFFERS.n_bytes
    pm(*batch)
    pm.train_step(*batch)
    assert BUFFERS.n_bytes == before > 0


def test_a_graph_that_is_kept_as_a_step(case: Any) -> None:
    test_a_graph_that_is_kept_gives_the_same_gradients_twice(case, as_a_step=True)


def test_recorded_steps_refuse_hooks_and_take_operators(case: Any) -> None:
    """A recording has the copies to the host and back, and no others use the buffers of a replay."""
    _, batch, _ = case
    pm = autopar.parallelize(net(), "data=1", batch[:1], loss_fn=nn.functional.mse_loss, targets=batch[1:],
                             plan=moved_plan(case))  # fmt: skip
    with pytest.raises(RunError, match=r"pm.compile\(backend='eager'\)"):
        autopar.GraphedStep(pm, *batch)
    loss = pm.train_step(*batch)
    gradients = [p.grad.clone() for p in pm.parameters()]
    pm.compile(backend="eager")
    step = autopar.GraphedStep(pm, *batch, recorder=RecordedKernels())
    assert step.host_buffers
    for _ in range(2):
        pm.zero_grad()
        assert step(*batch).item() == loss.item()
        assert all(torch.equal(a, p.grad) for a, p in zip(gradients, pm.parameters(), strict=True))
        for buffer in step.host_buffers:
            buffer.zero_()


def test_blocks_that_are_recomputed_keep_no_others_from_moving(case: Any) -> None:
    model, batch, captured = case
    options: dict[str, Any] = {"mesh": "data=1", "captured": captured, "recompute": ["1"]}
    plan = autopar.plan(model, stand_in.stand_in(), batch[:1], **options, offload="activations=*")
    assert set(plan.memory["offload"]) == {"tanh", "linear_5", "linear_7", "tanh_2", "tanh_3"}  # 1 reads linear_1
    limit = plan.price.memory_bytes
    assert "offload of 5 activations" in plan_in_words(captured.graph, plan)
    plan = autopar.plan(model, stand_in.stand_in(), batch[:1], **options, offload="activations", memory_limit=limit)
    assert plan.memory["offload"] and plan.price.memory_bytes <= limit
    plan = autopar.plan(model, stand_in.stand_in(), batch[:1], **options, offload="activations=1.0")
    assert "offload" not in plan.memory and any("nothing is moved: no result of '1.0'" in note for note in plan.notes)


def test_no_more_is_moved_than_the_limit_asks_for(case: Any) -> None:
    """Where no copy is waited for, all plans are as fast; the one that moves least is taken."""
    model, batch, captured = case
    options: dict[str, Any] = {"mesh": "data=1", "captured": captured, "recompute": "none"}
    free = autopar.plan(model, stand_in.stand_in(), batch[:1], **options)
    numbers = []
    for share in (0.95, 0.85, 0.75):
        plan = autopar.plan(model, stand_in.stand_in(), batch[:1], **options, offload="activations",
                            memory_limit=int(share * free.price.memory_bytes))  # fmt: skip
        numbers.append(len(plan.memory["offload"]))
        assert plan.price.activation_seconds == free.price.activation_seconds  # nothing is waited for, to the bit
    assert numbers == sorted(numbers) and numbers[0] < numbers[-1] < 7, numbers


def test_copies_on_a_processor_are_not_counted_as_memory_of_the_device(case: Any) -> None:
    _, batch, _ = case
    plan = moved_plan(case)
    pm = autopar.parallelize(net(), "data=1", batch[:1], loss_fn=nn.functional.mse_loss, targets=batch[1:], plan=plan)
    optimizer = torch.optim.AdamW(pm.parameters(), foreach=False)
    for _ in range(2):
        pm.train_step(*batch, optimizer=optimizer)
    state = [x for of_one in optimizer.state.values() for x in of_one.values()]
    peak = peak_bytes(lambda: pm.train_step(*batch, optimizer=optimizer), [*pm.parameters(), *state], batch, "cpu")
    assert peak == pytest.approx(plan.price.memory_bytes, rel=0.06)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model(case: Any, reentrant: bool) -> None:
    """Inside of a backward, where the forward runs again, nothing leaves: no hook of that graph would fill it."""
    _, batch, _ = case
    pm = autopar.parallelize(net(), "data=1", batch[:1], loss_fn=nn.functional.mse_loss, targets=batch[1:],
                             plan=moved_plan(case))  # fmt: skip
    pm(*batch).backward()
    expected = [p.grad.clone() for p in pm.parameters()]
    pm.zero_grad()
    one = torch.ones((), requires_grad=True)
    checkpoint(lambda factor: factor * pm(*batch), one, use_reentrant=reentrant).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, pm.parameters(), strict=True))


def test_buffers_are_never_more_than_were_in_use() -> None:
    """Batches of many shapes ask for buffers of many sizes, one shape after another."""
    buffers = HostBuffers()
    for n in range(1, 50):
        taken = [buffers.take(n, False) for _ in range(3)]
        assert buffers.n_bytes == 3 * n
        for buffer in taken:
            buffers.give_back(buffer)
    assert [buffers.take(7, False).numel() for _ in range(21)] == [7] * 21 and buffers.n_bytes == 3 * 49


def test_a_buffer_comes_back_while_another_is_taken() -> None:
    """The collector may run in any allocation, and give back what a dropped graph had."""
    buffers = HostBuffers()
    with buffers._lock:
        buffers.give_back(buffers.take(8, False))
    assert buffers.n_bytes == 8


def test_waits_by_hand() -> None:
    """A copy out is waited for two tensors later; one in begins when the tensor two later is asked for."""
    moved = [Moved(2.0, 2.0, k, k) for k in range(4)]
    # out: ends at 3, 5, 7, 9; the third (at 3) waits for the first, the fourth (then at 4) for the second, until 5
    assert copy_waits(moved, [1.0] * 4, [1.0] * 4, 2) == (pytest.approx(9 - 4), pytest.approx(5.0))
    assert copy_waits(moved, [10.0] * 4, [10.0] * 4, 2) == (pytest.approx(2.0), pytest.approx(2.0))
    assert copy_waits(moved[:3], [10.0] * 5, [10.0] * 5, 2) == (0.0, 0.0)
    assert copy_waits([], [1.0], [1.0], 2) == (0.0, 0.0)
