"""The even division of a model's blocks over the stages of a pipeline, as Megatron-LM's.

Blocks are modules that are numbered (``model.layers.3``) and hold products with parameters. Every stage gets equally
many. Where they do not divide, the last stage has one less, then the first, which have the logits and the embedding
(Llama 3, arXiv:2407.21783, section 3.3.2); then the last but one, and so on from both ends. What is before the first
block is in the first stage, what is behind the last one in the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from autopar.errors import PlanError
from autopar.plans.stage_graphs import hot_ops
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph

WORKS = ("matmul", "conv", "attention")


def numbered(module: str) -> tuple[str, str]:
    """Return the path of the outermost numbered module that a path is in, and that of its list; empty for none."""
    parts = module.split(".") if module else []
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ("", "") if number is None else (".".join(parts[: number + 1]), ".".join(parts[:number]))


def block_of(module: str) -> str:
    """Return the path of the outermost numbered module that a path is in; empty for none."""
    return numbered(module)[0]


def blocks_of(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return the first and the last position among :func:`~autopar.plans.stage_graphs.hot_ops` of every block."""
    rules = rules_of(graph)
    spans: dict[str, tuple[int, int]] = {}
    works: set[str] = set()
    for p, i in enumerate(hot_ops(graph)):
        block, _ = numbered(graph.nodes[i].module)
        if block:
            spans[block] = spans.get(block, (p, p))[0], p
            rule = rules[i]
            if rule is not None and rule.kind in WORKS:
                works.add(block)
    return {block: span for block, span in spans.items() if block in works}


def lists_of_blocks(graph: Graph) -> list[str]:
    """Return the paths of the lists that hold blocks, such as ``model.layers``."""
    return list(dict.fromkeys(numbered(block)[1] for block in blocks_of(graph)))


def sizes_of(n_blocks: int, n_stages: int) -> list[int]:
    """Return how many blocks each stage has."""
    sizes = [-(-n_blocks // n_stages)] * n_stages
    for k in range(sum(sizes) - n_blocks):
        turn = k % n_stages
        sizes[-1 - turn // 2 if turn % 2 == 0 else turn // 2] -= 1
    return sizes


def starts(graph: Graph, n_stages: int, text: str) -> list[str]:
    """Return the names of the first operators of all stages but the first. ``text``: the layout, for messages."""
    if n_stages == 1:
        return []
    spans = list(blocks_of(graph).values())
    ops = hot_ops(graph)
    sizes = sizes_of(len(spans), n_stages)
    if min(sizes[1:-1], default=1) < 1 or len(spans) < n_stages - 2 or not spans:
        raise PlanError(f"{text}: {n_stages} stages (pp x vp) are more than the model's {len(spans)} blocks; use fewer")
    found: list[str] = []
    done = 0
    for size in sizes[:-1]:
        done += size
        at = spans[done][0] if done < len(spans) else spans[-1][1] + 1
        if at >= len(ops) or at == 0:
            raise PlanError(f"{text}: of {n_stages} stages (pp x vp) one would be empty; use fewer")
        found.append(graph.nodes[ops[at]].name)
    return found


def described(sizes: Sequence[int]) -> str:
    """Return how blocks are divided, for a note: ``blocks of the stages: 0, 126 x 1, 0``; nothing if they are even."""
    if len(set(sizes)) < 2:
        return ""
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    return "blocks of the stages: " + ", ".join(f"{n} x {size}" if n > 1 else f"{size}" for size, n in runs)
