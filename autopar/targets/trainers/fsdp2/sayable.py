"""Words of a layout that plain PyTorch can say, and those that it refuses for a model.

Sources are the modules of torch 2.13: ``torch.distributed.fsdp.fully_shard``, ``torch.distributed.tensor.parallel``,
``torch.distributed.pipelining.schedules``.
"""

from __future__ import annotations

from autopar.planner.layouts.layout_words import Layout
from autopar.targets.target import ModelFacts

SCHEDULES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved-1f1b": "ScheduleInterleaved1F1B",
}  # fmt: skip
"""Classes of ``torch.distributed.pipelining`` by the names of autopar's schedules. Those that split the backward
(ZB-H1 has no class of its own there; ``ScheduleZBVZeroBubble``, ``ScheduleDualPipeV``) are not written: with
``fully_shard`` their weight gradients come after the hooks that reduce them."""

WORDS: dict[str, tuple[str, ...] | None] = {
    "dp": None,
    "tp": None,
    "sp": ("",),
    "pp": None,
    "vp": None,
    # zero=2 is zero=1 with one microbatch, and fsdp=keep too: FSDP2 runs both as zero=1
    "zero": ("0", "1", "3"),
    "fsdp": ("", "[0-9]*"),
    "schedule": tuple(SCHEDULES),
    "recompute": ("none", "full", "full:*", "every:*", "selective:*"),
    "optimizer": ("adamw", "sgd", "sgd_momentum"),
}


def refuses(layout: Layout, model: ModelFacts) -> str:
    """Return why plain torch cannot train the model in the layout; empty if it can."""
    schedule = layout.schedule.partition(":")[0]
    if layout.sizes["cp"] > 1:
        return f"cp={layout.sizes['cp']} needs attention that is written for it; use cp=1"
    if layout.experts > 1 or layout.experts_travel:
        return "torch has no style for routed experts on several ranks; use dp with fsdp, and ep=1"
    if layout.groups > 1 and schedule not in SCHEDULES:
        return f"schedule={schedule} is none of {', '.join(SCHEDULES)}; use one of these"
    if schedule == "interleaved-1f1b" and layout.microbatches and layout.microbatches % layout.groups:
        # schedules.py, ScheduleInterleaved1F1B: microbatches have to be a multiple of the rounds, max(1, m // pp)
        rounds = max(1, layout.microbatches // layout.groups)
        if layout.microbatches % rounds:
            return (
                f"ScheduleInterleaved1F1B runs microbatches in {rounds} rounds, and {layout.microbatches} do not "
                f"divide; use a multiple of pp={layout.groups}"
            )
    if layout.sizes["tp"] > 1 and model.experts:
        return (
            f"tp={layout.sizes['tp']} would cut the {model.experts} experts of a layer, whose weights are no Linear; "
            "use dp with fsdp"
        )
    return ""
