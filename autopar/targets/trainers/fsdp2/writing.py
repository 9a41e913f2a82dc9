"""The files of an exported folder."""

from __future__ import annotations

import pprint
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.frontends import split_spec
from autopar.rules.registry import drawing
from autopar.targets.target import Export, WrittenFiles
from autopar.targets.trainers.fsdp2.decisions import model_tables, parallel_tables
from hardware_profiles.strict import read_text

FOLDER = Path(__file__).parent / "folder"


def write(export: Export) -> WrittenFiles:
    """Write the folder that runs a plan in plain torch.

    Raises:
        PlanError: plain torch cannot run the model in the layout; the message has the module and what can be used.
    """
    if not export.priced.pinned.runs:
        raise PlanError(f"fsdp2: {export.layout.text}: {export.priced.pinned.notes[0]}")
    tables = parallel_tables(export)
    files = {
        "train.py": filled("train.py", "model", model_tables(export)),
        "parallelize.py": filled("parallelize.py", "decisions", tables),
    }
    for table, name in (("TENSOR", "tensor_parallel.py"), ("PIPELINE", "pipeline.py")):
        if tables[table]:
            files[name] = read_text(FOLDER / name)
    files |= model_files(export)
    notes = tuple(notes_of(export))
    return WrittenFiles(files, ("train.py", "--steps", "1000"), ("batches() in train.py: your data",), notes)


def model_files(export: Export) -> dict[str, str]:
    """Return the files that the model is made from: its config, or its source with what that imports beside it."""
    prefix, path, _ = split_spec(export.loaded.spec)
    source = Path(path)
    if prefix:
        return {"config.json": read_text(source)}
    files: dict[str, str] = {}
    waiting = [source]
    while waiting:
        file = waiting.pop()
        if file.name in files:
            continue
        text = files[file.name] = read_text(file)
        for name in re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE):
            waiting += [beside for beside in [source.parent / f"{name}.py"] if beside.is_file()]
    if taken := files.keys() & {"train.py", "parallelize.py", "pipeline.py", "tensor_parallel.py"}:
        raise PlanError(f"fsdp2: the model's file {min(taken)} has the name of an exported file; rename it")
    return files


def filled(name: str, section: str, tables: Mapping[str, Any]) -> str:
    """Return a file of the folder with its tables replaced."""
    text = read_text(FOLDER / name)
    before, start, rest = text.partition(f"# --- {section} ---\n")
    _, end, after = rest.partition("# --- code ---\n")
    assert start and end, name
    return before + start + "".join(assignment(n, value) for n, value in tables.items()) + end + after


def assignment(name: str, value: Any) -> str:
    """Return a table as source, one key a line where it is long."""
    kind = "list[str]" if isinstance(value, list) else "dict[str, Any]"
    kind = "dict[str, int]" if name == "MESH" else kind
    text = pprint.pformat(value, width=110, sort_dicts=False, compact=True)
    if "\n" in text:
        text = text[0] + "\n    " + text[1:-1].replace("\n", "\n   ") + ",\n" + text[-1]
    return f"{name}: {kind} = {text}\n"


def notes_of(export: Export) -> list[str]:
    """Return what a reader of the folder should know."""
    notes = ["every rank builds the whole model on its processor before it is cut; give large models a checkpoint"]
    if export.model.batch_norms:
        notes.append("batch norms take the statistics of a microbatch over all data ranks")
    if drawing(export.captured.graph) and (export.microbatches > 1 or export.layout.n_devices > 1):
        notes.append("it draws random numbers (dropout), others than on one device: losses agree on average alone")
    return notes
