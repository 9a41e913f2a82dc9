"""Names of a model's blocks as people say them: ``layers 0 to 17``, ``vision_tower layers 0 to 23``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from autopar.report.rows import BlockRows
from autopar.words.graph import Graph

MOST_NAMES = 4
"""Most names of what is outside of blocks."""


def place_in_list(module: str) -> tuple[str, int | None]:
    """Return the list of blocks that a module is in, and its number: ``model.layers, 3``.

    Of nested lists it is the outer one. Without a number it is no list's: ``model.norm, None``.
    """
    parts = module.split(".")
    at = next((k for k, part in enumerate(parts) if k and part.isdecimal()), None)
    return (module, None) if at is None else (".".join(parts[:at]), int(parts[at]))


def lists_of(graph: Graph) -> dict[str, str]:
    """Return the model's lists of blocks by path, with their names: the shortest that tell them apart.

    Example: ``{"model.layers": "layers"}``; with two lists ``{"model.vision_tower.layers": "vision_tower layers",
    "model.language_model.layers": "language_model layers"}``.
    """
    found = (place_in_list(node.module) for _, node in graph.of_kind("op"))
    paths = list(dict.fromkeys(path for path, number in found if number is not None))
    split = [path.split(".") for path in paths]
    common = 0
    while len(split) > 1 and all(len(p) > common + 1 and p[common] == split[0][common] for p in split):
        common += 1
    names = {}
    for path, parts in zip(paths, split, strict=True):
        own = parts[-1] if len(parts[-1]) > 1 else "blocks"
        names[path] = own if len(paths) == 1 or len(parts) == common + 1 else f"{parts[common]} {own}"
    many = list(names.values())
    return {path: name if many.count(name) == 1 else path for path, name in names.items()}


def modules_in_words(lists: Mapping[str, str], modules: Iterable[str]) -> str:
    """Return modules in execution order as ``embed_tokens, layers 0 to 17``."""
    names: dict[str, list[int]] = {}
    for module in modules:
        path, number = place_in_list(module)
        if number is None:
            holds_lists = any(list_.startswith(path + ".") for list_ in lists)
            if (last := path.rpartition(".")[2]) and not holds_lists:
                names.setdefault(last, [])
        else:
            names.setdefault(lists.get(path, path), []).append(number)
    words = [_numbered(name, sorted(set(numbers))) if numbers else name for name, numbers in names.items()]
    more = f" and {len(words) - MOST_NAMES} more" if len(words) > MOST_NAMES else ""
    return ", ".join(words[:MOST_NAMES]) + more


def block_title(lists: Mapping[str, str], block: BlockRows) -> str:
    """Return the name of equal blocks: ``layers 0 to 17``; of operators outside of blocks, their modules."""
    first, _, last = block.name.partition(" .. ")
    a, b = first.split("."), (last or first).split(".")
    differs = [k for k in range(min(len(a), len(b))) if a[k] != b[k]]
    if len(differs) == 1 and a[differs[0]].isdecimal() and b[differs[0]].isdecimal():
        at = differs[0]
        path = ".".join(a[:at])
        return _numbered(lists.get(path, path), [int(a[at]), int(b[at])], whole=True)
    if block.name and place_in_list(first)[1] is None:
        return block.name
    return modules_in_words(lists, (op.module for op in block.ops))


def _numbered(name: str, numbers: Sequence[int], whole: bool = False) -> str:
    """Return ``layers 0 to 17``, ``layer 3`` or ``layers 0 to 3 and 5``; ``whole`` takes two numbers as a range."""
    runs = [(numbers[0], numbers[-1])] if whole else _runs(numbers)
    if len(runs) == 1 and runs[0][0] == runs[0][1]:
        return f"{name[:-1] if name.endswith('s') else name} {runs[0][0]}"
    said = [str(a) if a == b else f"{a} to {b}" for a, b in runs]
    return f"{name} {', '.join(said[:-1])} and {said[-1]}" if len(said) > 1 else f"{name} {said[0]}"


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return ascending numbers as ranges."""
    runs = []
    for _, run in groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0]):
        of_run = [number for _, number in run]
        runs.append((of_run[0], of_run[-1]))
    return runs
