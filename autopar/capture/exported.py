"""What a node of an exported program says of itself: its tensors, its module, its line in the user's code."""

from __future__ import annotations

from typing import Any

import torch

from autopar.graph import Spec


def flat(val: Any) -> list[Any]:
    """The results of an operator as a list, of one too."""
    return list(val) if isinstance(val, (tuple, list)) else [val]


def spec_of(val: Any) -> Spec:
    """Shape and dtype of a traced tensor."""
    return Spec(tuple(int(n) for n in val.shape), str(val.dtype).removeprefix("torch."))


def is_inplace(target: Any) -> bool:
    """Whether an operator writes to its first argument, by its name."""
    name = target._schema.name.split("::")[-1]
    return name.endswith("_") and not name.endswith("__")


def is_random(target: str) -> bool:
    """Whether an operator draws numbers, by its name: two calls are not one."""
    return any(word in target for word in ("dropout", "bernoulli", "rand", "normal"))


def module_of(fx: torch.fx.Node) -> str:
    """Path of the module whose code made a node."""
    stack = fx.meta.get("nn_module_stack") or {}
    last = list(stack.values())[-1] if stack else ("", "")
    path = last[0]
    return path.replace("L['self'].", "").replace("L['self']", "")


def source_of(fx: torch.fx.Node) -> str:
    """``file.py:12`` of the innermost line outside torch."""
    trace = fx.meta.get("stack_trace") or ""
    found = ""
    for text in trace.splitlines():
        text = text.strip()
        if text.startswith("File ") and "/torch/" not in text:
            parts = text.split('"')
            number = text.split(", line ")[-1].split(",")[0]
            found = f"{parts[1].rsplit('/', 1)[-1]}:{number}"
    return found


def at(fx: torch.fx.Node) -> str:
    """`` at file.py:12`` for messages; empty where the line is not known."""
    source = source_of(fx)
    return f" at {source}" if source else ""


def get(module: Any, path: str) -> Any:
    """The attribute at a dotted path."""
    for part in path.split("."):
        module = getattr(module, part)
    return module
