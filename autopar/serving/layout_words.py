"""Layouts of a worker in people's words: ``tp=4,pp=2,ep=8,batch=32``."""

from __future__ import annotations

from autopar.errors import PlanError, closest
from autopar.serving.records import WorkerLayout
from autopar.serving.worker_layouts import ModelShape

WORDS = ("tp", "pp", "dp", "cp", "ep", "etp", "batch")
"""Tensor, stages, attention data, context, experts, tensor of an expert; requests on an attention data rank."""
MOST = 2**20


def layout_in(words: str, shape: ModelShape) -> tuple[WorkerLayout, int | None]:
    """Return a layout, and the requests in flight if they are said.

    Raises:
        PlanError: a word is not known, or the model does not divide so.
    """
    sizes: dict[str, int] = {}
    for part in words.split(","):
        name, equals, number = (text.strip() for text in part.partition("="))
        if name not in WORDS:
            raise PlanError(f"--like '{words}': '{name}' is no word of a serving layout; {closest(name, WORDS)}")
        if not equals or not number.isdigit() or not 1 <= int(number) <= MOST:
            raise PlanError(f"--like '{words}': '{part.strip()}' is no {name}=number, of 1 to {MOST:,}")
        if name in sizes:
            raise PlanError(f"--like '{words}' says {name} twice")
        sizes[name] = int(number)
    tensor, data, context = sizes.get("tp", 1), sizes.get("dp", 1), sizes.get("cp", 1)
    ranks = tensor * data * context
    expert = sizes.get("ep", 1)
    layout = WorkerLayout(
        tensor, sizes.get("pp", 1), data, context, expert, sizes.get("etp", ranks // expert) if shape.experts else 1,
        max(1, tensor // max(1, shape.kv_heads)),
    )  # fmt: skip
    _check(words, layout, shape, sizes)
    return layout, sizes.get("batch")


def _check(words: str, layout: WorkerLayout, shape: ModelShape, sizes: dict[str, int]) -> None:
    ranks = layout.tensor * layout.attention_data * layout.context
    if not shape.experts and ("ep" in sizes or "etp" in sizes or layout.attention_data > 1):
        raise PlanError(
            f"--like '{words}': the model has no experts, so ep, etp and dp mean nothing; replicas are counted from "
            "the devices"
        )
    if shape.heads % layout.tensor:
        raise PlanError(f"--like '{words}': {shape.heads} heads do not divide over tp={layout.tensor}")
    if layout.stages > shape.blocks:
        raise PlanError(f"--like '{words}': pp={layout.stages}, and the model has {shape.blocks} blocks")
    if shape.experts and layout.expert * layout.expert_tensor != ranks:
        raise PlanError(
            f"--like '{words}': ep * etp is {layout.expert * layout.expert_tensor}, and must be tp * dp * cp = {ranks}"
        )
    if shape.experts and shape.experts % layout.expert:
        raise PlanError(f"--like '{words}': {shape.experts} experts do not divide over ep={layout.expert}")
    if shape.experts and shape.expert_features % layout.expert_tensor:
        raise PlanError(
            f"--like '{words}': {shape.expert_features} features of an expert do not divide over "
            f"etp={layout.expert_tensor}"
        )
