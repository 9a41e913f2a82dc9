"""Fields out of command lines and the shell scripts that hold them; nothing is run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.errors import closest
from autopar.targets.target import ConfigError, Source
from autopar.targets.trainers.torchtitan.fields import RENAMED, SaidFields, defaults, registry, sizes_of
from autopar.targets.trainers.torchtitan.texts import check_names, new_defaults, of_python, of_toml, old_said
from hardware_profiles.strict import Unreadable, read_text

PROGRAM = re.compile(r"(torchtitan[./]|^|/)(train(\.py)?|run_train\.sh|run_llama_train\.sh|run_train_precompile\.sh)$")
"""What starts torchtitan."""
VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")
ASSIGNED = re.compile(r"^(\w+)=(.*)$", re.DOTALL)


def of_command(source: Source) -> SaidFields:
    """Return what the arguments of torchtitan in a text say, on top of the config that they name.

    Raises:
        ConfigError: there is no such command, a field is unknown, or what it names cannot be known from the text.
    """
    words, given = _command(source)
    arguments: dict[str, Any] = {}
    named: dict[str, str] = {}
    _parse(source, words, arguments, named)
    devices = _devices(words, given)
    file = named.get("job.config_file") or given.get("CONFIG_FILE") or given.get("TRAIN_FILE")
    if file and "module" not in named and "MODULE" not in given:
        return _on_toml(source, file, arguments, devices)
    return _on_function(source, named, given, arguments, devices)


def _command(source: Source) -> tuple[list[str], dict[str, str]]:
    """Return the words of the command, and the variables that are set before and in front of it."""
    given: dict[str, str] = {}
    found: list[str] = []
    text = source.text.replace("\\\n", " ")
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        words = [word for word in words if word not in ("export", "$@", '"$@"', "&&")]
        front = 0
        while front < len(words) and ASSIGNED.match(words[front]):
            name, value = words[front].split("=", 1)
            given[name] = _expanded(value, given)
            front += 1
        words = [_expanded(word, given) for word in words[front:]]
        is_plain = bool(words) and words[0].startswith("--")
        if any(PROGRAM.search(word) for word in words) or is_plain:
            found += words
    if not found:
        raise source.error("command", "no command of torchtitan in it; give that with torchtitan.train or run_train.sh")
    return found, given


def _expanded(text: str, given: Mapping[str, str]) -> str:
    """Put in variables that the text sets, and the defaults of others (``${NGPU:-8}``)."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        otherwise = match[2].strip("\"'") if match[2] is not None else match[0]
        return given.get(name, otherwise)

    return VARIABLE.sub(value, text)


def _parse(source: Source, words: list[str], arguments: dict[str, Any], named: dict[str, str]) -> None:
    """Sort the words behind the program into fields and what names the config."""
    start = next((i + 1 for i, word in enumerate(words) if PROGRAM.search(word)), 0)
    rest = words[start:]
    i = 0
    while i < len(rest):
        word = rest[i]
        i += 1
        if not word.startswith("--"):
            section, colon, choice = word.replace("-", "_").partition(":")
            if colon:  # a choice among policies, as torchtitan's parser has it
                arguments[section] = choice.replace("_", "-")
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        is_flag = not equals and (i == len(rest) or rest[i].startswith("--") or ":" in rest[i])
        if not equals and not is_flag:
            value = rest[i]
            i += 1
        if name in ("module", "config", "job.config_file"):
            named[name] = value
            continue
        arguments[name] = True if is_flag else value
    for name in [each for each in arguments if ".no_" in each or each.startswith("no_")]:
        del arguments[name]
        arguments[name.replace(".no_", ".").removeprefix("no_")] = False
    unknown = [str(value) for value in arguments.values() if isinstance(value, str) and "$" in value]
    if unknown:
        name = next(each for each, value in arguments.items() if value == unknown[0])
        raise source.error(name, f"is {unknown[0]}, which the text does not set; write the value")


def _typed(name: str, text: Any, defaults_: Mapping[str, Any]) -> Any:
    """Return an argument's value as its field has it."""
    if not isinstance(text, str):
        return text
    default = defaults_.get(name)
    if isinstance(default, str) or text in ("", "None"):
        return None if text == "None" else text
    if isinstance(default, bool):
        return text.lower() in ("true", "1", "yes")
    if isinstance(default, list) and not text.startswith("["):
        return text.split(",")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _devices(words: list[str], given: Mapping[str, str]) -> int | None:
    """Return the devices that the launcher starts, where the text says it."""
    said: dict[str, str] = {}
    for i, word in enumerate(words):
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in ("nproc_per_node", "nnodes"):
            said[name] = value if equals else words[i + 1] if i + 1 < len(words) else ""
    if "nproc_per_node" in said:
        each, nodes = said["nproc_per_node"], said.get("nnodes", "1")
    else:
        if not any(word.endswith("run_train.sh") for word in words) or "NGPU" not in given:
            return None
        each, nodes = given["NGPU"], given.get("NNODES", "1")
    return int(each) * int(nodes) if each.isdecimal() and nodes.isdecimal() else None


def _on_toml(source: Source, file: str, arguments: Mapping[str, Any], devices: int | None) -> SaidFields:
    found = _beside(source, file)
    if found is None:
        raise source.error("CONFIG_FILE", f"is {file}, which is not there; put it beside the script or price it")
    base = of_toml(found)
    check_names(source, [name for name in arguments if ":" not in name], old=True)
    old = defaults(old=True)
    values = {RENAMED.get(name, name): value for name, value in arguments.items()}
    return old_said({**base.values, **{name: _typed(name, value, old) for name, value in values.items()}}, devices)


def _beside(source: Source, file: str) -> Source | None:
    """Read the file that a script names: from its own folder or those above, or by its name alone."""
    if "$" in file:
        raise source.error("CONFIG_FILE", f"is {file}, which the text does not set; write the path")
    for folder in [source.path.parent, *source.path.parent.resolve().parents][:6]:
        for path in (folder / file, source.path.parent / Path(file).name):
            if path.is_file():
                try:
                    return Source(path, read_text(path))
                except (Unreadable, OSError) as error:
                    raise ConfigError(f"{source.path.name}: {file}: {error}; give a readable file") from None
    return None


def _on_function(
    source: Source, named: Mapping[str, str], given: Mapping[str, str], arguments: Mapping[str, Any],
    devices: int | None,
) -> SaidFields:
    """Return fields on top of the config function that ``--module`` and ``--config`` name."""
    module = named.get("module") or given.get("MODULE") or "llama3"
    config = named.get("config") or given.get("CONFIG") or "llama3_debugmodel"
    check_names(source, [name for name in arguments if name != "activation_checkpoint"], old=False)
    base, sizes = _base(source, module, config)
    found = new_defaults()
    values = {RENAMED.get(name, name): value for name, value in arguments.items()}
    typed = {name: _typed(name, value, found) for name, value in values.items()}
    return SaidFields({**base, **typed}, False, found, sizes, devices)


def _base(source: Source, module: str, config: str) -> tuple[dict[str, Any], dict[str, int]]:
    own = registry()["configs"]
    if module not in own:
        file = _beside(source, f"{module.replace('.', '/')}.py")
        if file is not None:
            said = of_python(file)
            return dict(said.values), dict(said.sizes)
        raise source.error("--module", f"{module} has configs that are not known here; {closest(module, own)}")
    if config not in own[module]:
        raise source.error("--config", f"{config} is no known config of {module}; {closest(config, own[module])}")
    base = {RENAMED.get(name, name): value for name, value in own[module][config].items()}
    return base, sizes_of(module, str(base.pop("flavor")))

