"""Which files are configs of Megatron, and what they say."""

from __future__ import annotations

import re
import shlex

from autopar.targets.target import Config, Source
from autopar.targets.trainers.megatron.configs import config_of
from autopar.targets.trainers.megatron.fields import effect, kinds
from autopar.targets.trainers.megatron.options import options_of_words, shown
from autopar.targets.trainers.megatron.shell import Command, Script, read_script
from autopar.targets.trainers.megatron.yaml_files import kind_of, read_bridge, read_yaml, tree_of
from hardware_profiles.strict import Unreadable, parse_count

YAML = (".yaml", ".yml")
TELLING = ("--tensor-model-parallel-size", "--micro-batch-size", "--pipeline-model-parallel-size", "--num-layers")
BRIDGE = re.compile(r"[+~]{0,2}(model|train|ddp|dataset|mixed_precision|comm_overlap|optimizer)\.\w+(\.\w+)*=")
OVERRIDE = re.compile(r"[+~]{0,2}([a-z_0-9]+(?:\.\w+)*)=(.*)", re.DOTALL)
PER_NODE = ("--nproc_per_node", "--nproc-per-node")
NODES = ("--nnodes",)


def reads(source: Source) -> bool:
    """Return whether a file is a config of Megatron-LM, NeMo or Megatron-Bridge."""
    if source.path.suffix in YAML:
        tree = tree_of(source)
        return tree is not None and bool(kind_of(tree))
    if source.path.suffix in (".json", ".toml", ".py"):
        return False
    return any(option in source.text for option in TELLING[:2]) or _is_bridge(source.text)


def _is_bridge(text: str) -> bool:
    return "model.tensor_model_parallel_size=" in text or "train.micro_batch_size=" in text


def read(source: Source) -> Config:
    """Return what a file says; nothing of it is imported or run.

    Raises:
        ConfigError: an option is unknown, is taken from outside the file, or cannot be honoured.
    """
    if source.path.suffix in YAML:
        tree = tree_of(source)
        if tree is None or not kind_of(tree):
            raise source.error(
                "the file", "is no yaml of Megatron: it has no language_model, MODEL_ARGS, or model beside a trainer"
            )
        return read_yaml(source, tree)
    script = read_script(source.text)
    command = _command(source, script)
    devices = _devices(source, command)
    overrides = {found[1]: found[2] for word in command.words if (found := OVERRIDE.fullmatch(word))}
    if any("." in name for name in overrides) and not any(word in kinds() for word in command.words if word in TELLING):
        return read_bridge(source, overrides, devices)
    options = options_of_words(source, command.words)
    added = [text for text in script.undecided if _matters(text)]
    options.unpriced += [f"{text}: the text does not decide whether it is added; left out" for text in added]
    return config_of(options, devices)


def _matters(added: str) -> bool:
    """Return whether options that may be added change the price."""
    names = re.findall(r"--[a-z0-9-]+", added)
    return any(name in kinds() and effect(name) for name in names)


def _command(source: Source, script: Script) -> Command:
    """Return the command that trains; in a file without one, all of it are options."""
    trains = [c for c in script.commands if any(word in TELLING or BRIDGE.match(word) for word in c.words)]
    if trains:
        best = max(trains, key=lambda command: len(command.words))
        if re.search(r"inference|generation|server|convert", best.program):
            raise source.error(shown(best.program), "does not train; give the script that does")
        return best
    if (words := _in_variables(script)) and not script.commands:
        return Command([], "", words)
    if script.commands and not _only_options(source.text):
        programs = ", ".join(sorted({shown(command.program) for command in script.commands}))
        raise source.error(programs, f"is started without {TELLING[1]}; give the script that has Megatron's options")
    try:
        words = shlex.split(source.text, comments=True)
    except ValueError as error:
        raise source.error("the file", f"has no command of Megatron, and is no list of its options ({error})") from None
    if not words or not (words[0].startswith("--") or OVERRIDE.fullmatch(words[0])):
        raise source.error("the file", "starts no Python program with Megatron's options, and is no list of them")
    return Command([], "", words)


def _in_variables(script: Script) -> list[str]:
    """Return the options in the variables of a script that another one runs."""
    values = [v for v in script.values.values() if v is not None]
    lists = [v if isinstance(v, list) else v.split() for v in values]
    found = [part for words in lists for part in words if words[:1] and words[0].startswith("--")]
    return found if any(word in TELLING for word in found) else []


def _only_options(text: str) -> bool:
    first = next((line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    return first.startswith("--")


def _devices(source: Source, command: Command) -> int | None:
    """Return how many ranks are started, by torchrun's words or Slurm's lines; None where neither says it."""
    each = _after(command.launcher, PER_NODE)
    nodes = _after(command.launcher, NODES)
    if each is None:
        each = _slurm(source.text, "ntasks-per-node") or _slurm(source.text, "gpus-per-node")
        nodes = nodes or _slurm(source.text, "nodes")
    return each * nodes if each and nodes else None


def _after(words: list[str], names: tuple[str, ...]) -> int | None:
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if name in names:
            try:
                return parse_count(value if equals else following)
            except Unreadable:
                return None
    return None


def _slurm(text: str, name: str) -> int | None:
    found = re.search(rf"^#SBATCH\s+--{name}[=\s]+(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None
