"""Fields out of TOML, and out of config functions, which are read as text and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import closest, first_few
from autopar.targets.target import Source
from autopar.targets.trainers.torchtitan.fields import (
    OF_COMPONENTS,
    RENAMED,
    UNCHECKED,
    SaidFields,
    defaults,
    known,
    registry,
    sizes_of,
)
from hardware_profiles.strict import Unreadable, parse_toml

SECTIONS = ("training", "parallelism", "compile", "activation_checkpoint")
"""Fields of a config function that are read; others are of data, tokenizers, logs."""
POLICIES = {
    "SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory-budget", "BlocksAC": "blocks",
}  # fmt: skip
NO_DECODERS = ("flux",)
"""Models with fields and trainers of their own."""
OWN = "blocks"
"""The policy of the file that autopar writes, and its field."""


def check_names(source: Source, names: Iterator[str] | list[str], *, old: bool) -> None:
    """Refuse a field that no release has.

    Raises:
        ConfigError: with the nearest known one.
    """
    fields = known(old=old)
    sections = {name.partition(".")[0] for name in fields}
    loose = UNCHECKED if old else OF_COMPONENTS
    for name in names:
        if name not in fields and name.partition(".")[0] not in loose:
            other = name.rpartition(".")[2]
            near = [each for each in fields if each.rpartition(".")[2] == other]
            section = name.partition(".")[0]
            inside = sorted(each for each in fields if each.partition(".")[0] == section) or sorted(sections)
            hint = f"did you mean '{sorted(near)[0]}'?" if near else closest(name, inside)
            kind = "0.1 and 0.2" if old else "0.3"
            what = "section" if name.partition(".")[0] not in sections else "field"
            raise source.error(name, f"no {what} of torchtitan {kind}; {hint}")


def of_toml(source: Source) -> SaidFields:
    """Return what a job config in TOML says."""
    try:
        tables = parse_toml(source.text)
    except Unreadable as error:
        raise source.error("TOML", f"{error}; give a job config of torchtitan") from None
    values = dict(_flat(tables))
    if values.get("model.name") in NO_DECODERS:
        name = values["model.name"]
        raise source.error("model.name", f"is {name}, which is no language model; only layouts of these are read")
    check_names(source, list(values), old=True)
    if "experimental.pipeline_parallel_degree" in values:  # before 0.1 a batch was cut into as many pieces as groups
        pieces = values["experimental.pipeline_parallel_degree"]
        values.setdefault("experimental.pipeline_parallel_microbatches", pieces)
    return old_said({RENAMED.get(name, name): value for name, value in values.items()})


def old_said(values: Mapping[str, Any], devices: int | None = None) -> SaidFields:
    """Return fields of a release with TOML, with the sizes of their model."""
    name, flavor = str(values.get("model.name", "llama3")), str(values.get("model.flavor", "debugmodel"))
    return SaidFields(values, True, defaults(old=True), sizes_of(name, flavor), devices)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def of_python(source: Source) -> SaidFields:
    """Return what a module with one config function says; nothing of it is run."""
    try:
        tree = ast.parse(source.text)
    except SyntaxError as error:
        what = f"line {error.lineno}: {error.msg}; give a module with a config function"
        raise source.error("Python", what) from None
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and _makes_config(node)}
    if len(functions) != 1:
        some = f"{len(functions)} config functions ({first_few(list(functions))})"
        what = some if functions else "no config function"
        raise source.error("Python", f"{what}; give a file with one, or the command with --module and --config")
    values: dict[str, Any] = {}
    _read_function(source, next(iter(functions.values())), values)
    sizes = _constant(tree, "MODEL") or {}
    _check_sizes(source, tree, sizes)
    flavor, module = values.pop("flavor", None), _module(tree)
    if not sizes and flavor and module:
        sizes = sizes_of(module, str(flavor))
    ours = ("optimizer.name", f"activation_checkpoint.{OWN}")
    check_names(source, [name for name in values if name not in ours], old=False)
    return SaidFields({RENAMED.get(name, name): value for name, value in values.items()}, False, new_defaults(), sizes)


def new_defaults() -> dict[str, Any]:
    """Return the newest release's defaults."""
    return {RENAMED.get(name, name): value for name, value in defaults(old=False).items()}


def _makes_config(node: ast.FunctionDef) -> bool:
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    return any({"training", "parallelism"} & {keyword.arg for keyword in call.keywords} for call in calls)


SIZES = {
    "dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size",
}  # fmt: skip
"""Arguments by which an export builds the model, and the sizes of ``MODEL`` that they are."""


def _check_sizes(source: Source, tree: ast.Module, sizes: Mapping[str, int]) -> None:
    """Refuse an export whose model is built with other sizes than ``MODEL`` says."""
    built = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "model"), None)
    calls = [node for node in ast.walk(built) if isinstance(node, ast.Call)] if built is not None else []
    layers = [call for call in calls if "n_layers" in {keyword.arg for keyword in call.keywords}]
    for keyword in (keyword for call in layers for keyword in call.keywords):
        name, value = SIZES.get(keyword.arg or "", ""), keyword.value
        if name in sizes and isinstance(value, ast.Constant) and value.value != sizes[name]:
            raise source.error(f"MODEL['{name}']", f"is {sizes[name]}, and the model is built with {keyword.arg}="
                               f"{value.value!r}; change both")  # fmt: skip


def _constant(tree: ast.Module, name: str) -> dict[str, int] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value = ast.literal_eval(node.value)
            return {k: v for k, v in value.items() if isinstance(v, int)} if isinstance(value, dict) else None
    return None


def _module(tree: ast.Module) -> str:
    """Return the module of torchtitan's models that a file imports from."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchtitan.models"):
            for part in [*(node.module or "").split("."), *(alias.name for alias in node.names)]:
                if part in registry()["models"]:
                    return part
    return ""


def _read_function(source: Source, node: ast.FunctionDef, values: dict[str, Any]) -> None:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            made = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            if {"training", "parallelism"} & made.keys():
                for section, value in made.items():
                    _read_section(source, section, value, values)
            elif ast.unparse(call.func).endswith("model_registry") and call.args and "flavor" not in values:
                values["flavor"] = _literal(source, "model_registry", call.args[0])
    for statement in node.body:  # config.training.steps = 10
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Attribute):
            name = ast.unparse(statement.targets[0]).partition(".")[2]
            if name.partition(".")[0] in SECTIONS:
                _read_section(source, name, statement.value, values)


def _read_section(source: Source, name: str, value: ast.expr, values: dict[str, Any]) -> None:
    """Read a keyword of the config: the fields of a section, or the policy of recomputation."""
    section = name.partition(".")[0]
    if section == "optimizer":
        values["optimizer.name"] = _optimizer(value)
        if "fused_opt_states_bf16" in ast.unparse(value):
            values["optimizer.implementation"] = "fused_opt_states_bf16"
    if section not in SECTIONS:
        return
    if name == "activation_checkpoint":
        kind = ast.unparse(value.func).rpartition(".")[0].rpartition(".")[2] if isinstance(value, ast.Call) else "None"
        if kind not in POLICIES and kind != "None":
            shown = kind or ast.unparse(value)
            raise source.error(name, f"{shown} is no policy of torchtitan; {closest(kind, POLICIES)}")
        values[name] = POLICIES.get(kind, "none")
    if isinstance(value, ast.Call):
        for keyword in value.keywords:
            field = f"{name}.{keyword.arg}"
            values[field] = _literal(source, field, keyword.value)
    elif "." in name:
        values[name] = _literal(source, name, value)
    elif name != "activation_checkpoint":
        raise source.error(name, f"is {ast.unparse(value)}, which only running it would tell; write its fields there")


def _optimizer(value: ast.expr) -> str:
    text = ast.unparse(value)
    named = [
        keyword.value.value for call in ast.walk(value) if isinstance(call, ast.Call) for keyword in call.keywords
        if keyword.arg == "optimizer_name" and isinstance(keyword.value, ast.Constant)
    ]  # fmt: skip
    return " and ".join(sorted({str(name) for name in named})) or ("AdamW" if "adamw" in text.lower() else text)


def _literal(source: Source, name: str, value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        what = f"is {ast.unparse(value)}, which only running it would tell; write the value"
        raise source.error(name, what) from None
