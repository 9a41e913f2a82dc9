"""Tensor parallelism by the styles of ``torch.distributed.tensor.parallel``, from the table TENSOR of parallelize.py.

``TENSOR["styles"]`` has for patterns of modules:

* ``columns``: the weight's output features (of an embedding: its features) are cut; ``input`` is how the input is laid
  out, ``whole`` or ``shard 1`` (cut along dim 1, which is gathered). ``local: False`` keeps the cut output a DTensor;
* ``rows``: the weight's input features (of an embedding: its vocabulary) are cut; ``output`` is the sum's layout;
* ``sequence``: the module is given, and returns, shards along ``dim``;
* ``inputs``: arguments of a module change their layout before it runs, ``{0: ["shard 1", "whole"]}`` by position or by
  name, of ``count`` positional ones.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


def apply(model: nn.Module, mesh: DeviceMesh, table: dict[str, Any]) -> None:
    """Cut the modules of a model over a mesh of one dim; those of other pipeline stages are left alone."""
    names: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append((module, name))
    tied = [places for places in names.values() if len(places) > 1]
    for path, module in list(model.named_modules()):
        for pattern, words in table["styles"].items():
            if fits(path, pattern) and not hasattr(module, "leaves_with"):
                parallelize_module(module, mesh, style(words, isinstance(module, nn.Embedding)))
    for (first, name), *others in tied:  # styles give each module a parameter of its own
        for module, other in others:
            setattr(module, other, getattr(first, name))


def fits(path: str, pattern: str) -> bool:
    """Check whether a path matches a pattern, part by part."""
    parts, names = path.split("."), pattern.split(".")
    return len(parts) == len(names) and all(map(fnmatchcase, parts, names))


def layout(words: str) -> Placement:
    """Return the placement of ``whole`` or ``shard 1``."""
    return Replicate() if words == "whole" else Shard(int(words.removeprefix("shard ")))


def style(words: dict[str, Any], is_embedding: bool) -> ParallelStyle:
    """Return a style from its words."""
    kind = words["style"]
    if kind == "columns":
        local = words.get("local", True)
        return ColwiseParallel(input_layouts=layout(words["input"]), use_local_output=local)
    if kind == "rows":
        given = Replicate() if is_embedding else Shard(-1)
        return RowwiseParallel(input_layouts=given, output_layouts=layout(words["output"]))
    if kind == "sequence":
        return SequenceParallel(sequence_dim=words["dim"], use_local_output=True)
    given = {key: (layout(a), layout(b)) for key, (a, b) in words["change"].items()}
    by_name = {key: pair for key, pair in given.items() if isinstance(key, str)}
    pairs = [given.get(k, (None, None)) for k in range(words["count"])]
    return PrepareModuleInput(
        input_layouts=tuple(a for a, _ in pairs) or None,
        desired_input_layouts=tuple(b for _, b in pairs) or None,
        input_kwarg_layouts={key: a for key, (a, _) in by_name.items()} or None,
        desired_input_kwarg_layouts={key: b for key, (_, b) in by_name.items()} or None,
        use_local_output=words.get("local", False),
    )
