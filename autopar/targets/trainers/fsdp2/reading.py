"""From the tables of an exported folder to the words of a layout; nothing of the file is run."""

from __future__ import annotations

import ast
import re
from typing import Any

from autopar.errors import closest
from autopar.targets.target import Config, Source
from autopar.targets.trainers.fsdp2.sayable import SCHEDULES

TABLES: dict[str, set[str] | None] = {
    "MESH": {"pipeline", "replicate", "shard", "tensor"},
    "BATCH": {"rows", "sequence", "microbatches", "inputs", "sum", "means"},
    "FULLY_SHARD": {"modules", "zero"},
    "CHECKPOINT": None,
    "PRECISION": {"parameters", "compute", "reduce"},
    "TENSOR": {"styles", "sequence", "loss_parallel"},
    "PIPELINE": {"schedule", "rows", "starts", "takes", "returns", "outside", "tied"},
}


def reads(source: Source) -> bool:
    """Return whether a file is a ``parallelize.py`` with tables."""
    return source.path.suffix == ".py" and "# --- decisions ---" in source.text and "\nMESH" in source.text


def read(source: Source) -> Config:
    """Read the tables of a ``parallelize.py``.

    Raises:
        ConfigError: a table or a key of it is missing, unknown, or has a value that no layout has.
    """
    tables = tables_of(source)
    sizes, batch, zero = tables["MESH"], tables["BATCH"], tables["FULLY_SHARD"].get("zero")
    for name in ("pipeline", "replicate", "shard", "tensor"):
        if not isinstance(sizes.get(name), int) or sizes[name] < 1:
            raise source.error(f"MESH['{name}']", f"is {sizes.get(name)!r}; give a whole number of 1 or more")
    for name in ("rows", "microbatches"):
        if not isinstance(batch.get(name), int) or batch[name] < 1:
            raise source.error(f"BATCH['{name}']", f"is {batch.get(name)!r}; give a whole number of 1 or more")
    words = {"dp": str(sizes["replicate"] * sizes["shard"]), "m": str(batch["microbatches"])}
    words |= sharding(source, sizes, zero)
    if sizes["tensor"] > 1:
        words["tp"] = str(sizes["tensor"])
        if tables["TENSOR"].get("sequence"):
            words["sp"] = ""
    words |= pipeline_words(source, sizes["pipeline"], tables["PIPELINE"])
    recompute = recomputed(source, tables)
    if recompute:
        words["recompute"] = recompute
    devices = sizes["pipeline"] * sizes["replicate"] * sizes["shard"] * sizes["tensor"]
    return Config(
        words, batch=batch["rows"], sequence=batch.get("sequence"), devices=devices,
        precision=precision_text(tables["PRECISION"]),
    )  # fmt: skip


def tables_of(source: Source) -> dict[str, Any]:
    """Return the tables, checked for their names and keys; those that are left out are empty."""
    found: dict[str, Any] = {}
    try:
        tree = ast.parse(source.text)
    except SyntaxError as error:
        raise source.error(f"line {error.lineno}", f"is no Python: {error.msg}; correct it") from None
    for node in tree.body:
        if not isinstance(node, (ast.AnnAssign, ast.Assign)) or node.value is None:
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        if not isinstance(target, ast.Name) or not target.id.isupper():
            continue
        if target.id not in TABLES:
            raise source.error(target.id, f"is no table of an exported folder; {closest(target.id, TABLES)}")
        try:
            found[target.id] = ast.literal_eval(node.value)
        except ValueError:
            raise source.error(target.id, "is computed; write its value, since nothing of the file is run") from None
    for name in ("MESH", "BATCH", "FULLY_SHARD"):
        if name not in found:
            raise source.error(name, "is missing; write the table")
    for name, keys in TABLES.items():
        value = found.setdefault(name, [] if keys is None else {})
        if not isinstance(value, list if keys is None else dict):
            raise source.error(name, f"is {value!r}; give a {'list' if keys is None else 'dict'}")
        for key in value if keys is not None else ():
            if keys is not None and key not in keys:
                raise source.error(f"{name}['{key}']", f"is no key of it; {closest(str(key), sorted(keys))}")
    return found


def sharding(source: Source, sizes: dict[str, int], zero: Any) -> dict[str, str]:
    """Return ``zero`` or ``fsdp``: which state is stored in shards, and among how many ranks."""
    if zero not in (0, 1, 3):
        raise source.error("FULLY_SHARD['zero']", f"is {zero!r}; give 0, 1 or 3")
    if zero == 0:
        if sizes["shard"] > 1:
            raise source.error("MESH['shard']", f"is {sizes['shard']} with zero 0, which shards nothing; give 1")
        return {}
    if sizes["replicate"] > 1 and zero == 1:
        what = f"is {sizes['replicate']} with zero 1; no layout has that, give 1 or zero 3"
        raise source.error("MESH['replicate']", what)
    if sizes["replicate"] > 1:
        return {"fsdp": str(sizes["shard"])} if sizes["shard"] > 1 else {}
    return {"zero": str(zero)}


def pipeline_words(source: Source, groups: int, table: dict[str, Any]) -> dict[str, str]:
    """Return the words of a pipeline: groups, stages on each, schedule."""
    if groups == 1:
        return {}
    names = {cls: name for name, cls in SCHEDULES.items()}
    schedule, starts = table.get("schedule"), table.get("starts")
    if schedule not in names:
        raise source.error("PIPELINE['schedule']", f"is {schedule!r}; {closest(str(schedule), names)}")
    if not isinstance(starts, list) or (len(starts) + 1) % groups:
        raise source.error("PIPELINE['starts']", f"makes stages that do not divide over MESH['pipeline']={groups}")
    chunks = (len(starts) + 1) // groups
    name = names[schedule] if chunks > 1 or names[schedule] != "interleaved-1f1b" else "1f1b"
    words = {"pp": str(groups), "schedule": name}
    return words | ({"vp": str(chunks)} if chunks > 1 else {})


def recomputed(source: Source, tables: dict[str, Any]) -> str:
    """Return the word of what is recomputed; empty for nothing."""
    patterns, blocks = tables["CHECKPOINT"], tables["FULLY_SHARD"].get("modules", [])
    if not patterns:
        return ""
    if patterns == blocks:
        return "full"
    lists = [block.removesuffix("*").removesuffix(".") for block in blocks]
    insides = [
        next((path.removeprefix(f"{of}.*.") for of in lists if path.startswith(f"{of}.*.")), "") for path in patterns
    ]
    if all(insides):
        return "selective:" + "+".join(dict.fromkeys(insides))
    numbers = [int(found[1]) for p in patterns if (found := re.fullmatch(r".*?(\d+)", p))]
    step = numbers[0] + 1 if numbers else 1
    if step > 1 and len(numbers) == len(patterns) and numbers == list(range(step - 1, step * len(numbers), step)):
        return f"every:{step}"
    starts = [patterns[0], *tables["PIPELINE"].get("starts", [])]
    each, rest = divmod(len(patterns), len(starts))
    if step == 1 and each and not rest and patterns[::each] == starts:
        return f"full:{each}"
    what = f"{', '.join(patterns[:3])} are no blocks that a layout has; give all, every second one, the first ones of "
    raise source.error("CHECKPOINT", what + "all stages, or one module of all blocks")


def precision_text(table: dict[str, str]) -> str | None:
    """Return the policy as ``--precision`` spells it; None for the model's formats."""
    if not table:
        return None
    if "compute" not in table:
        return f"params=own,reduce={table.get('reduce', 'float32')}"
    stored = table.get("parameters", "float32")
    return f"params={table['compute']},master={stored},moments={stored},reduce={table.get('reduce', 'float32')}"
