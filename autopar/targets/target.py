"""The record of a trainer that plans are exported to and whose files are priced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autopar.capture import Captured
from autopar.errors import PlanError
from autopar.frontends import Loaded
from autopar.planner.layouts.layout_words import Layout
from autopar.planner.layouts.pricing import PricedLayout
from autopar.words.precision import Precision
from hardware_profiles import Cluster


class ConfigError(PlanError):
    """A file of a trainer that cannot be read or honoured; the message names the field."""


@dataclass(frozen=True)
class ModelFacts:
    """What decides whether a trainer can train a model in a layout.

    Attributes:
        family: ``model_type`` of a Hugging Face config, such as ``llama``; empty for a model of one's own.
        config: that config as a dict; empty for a model of one's own.
        blocks: the number of modules that repeat and hold products: layers.
        lists: the paths of the lists that hold them, such as ``model.layers``.
        parameters: elements of all parameters.
        experts: routed experts of a layer; 0 for none.
        batch_norms: the model has batch norms, which take statistics of a microbatch.
    """

    family: str
    config: Mapping[str, object]
    blocks: int
    lists: tuple[str, ...]
    parameters: int
    experts: int = 0
    batch_norms: bool = False

    def number(self, *names: str) -> int | None:
        """Return the first of these fields of the config that is a whole number; None where there is none."""
        found = (self.config.get(name) for name in names)
        return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)

    @property
    def heads(self) -> int | None:
        """Heads of attention; None where the config does not say it."""
        return self.number("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")

    @property
    def key_heads(self) -> int | None:
        """Heads of keys and values, as many as of queries in latent attention; None where the config says neither."""
        return (None if self.number("kv_lora_rank") else self.number("num_key_value_heads")) or self.heads


@dataclass(frozen=True)
class Export:
    """What a trainer's files are written from.

    Attributes:
        priced: the plan of the layout, priced as this trainer runs it; ``priced.plan`` has stages, parameters, seconds.
        loaded: the model on the meta device, its example batch (that of a step) and its spec.
        captured: the capture of the batch of a step; ``priced.captured`` is that of a microbatch.
        cluster: where it runs; ``cluster_name`` is its name.
        rows: rows of a step's batch over all ranks.
        sequence: places of a row; None where inputs are no sequences.
        precision: the policy that the plan was priced under, also where a word of the layout says it.
        optimizer: ``adamw``, ``sgd`` or ``sgd_momentum``, likewise.
    """

    priced: PricedLayout
    loaded: Loaded
    captured: Captured
    model: ModelFacts
    cluster: Cluster
    cluster_name: str
    rows: int
    sequence: int | None
    precision: Precision | None
    optimizer: str

    @property
    def layout(self) -> Layout:
        """The layout that is written."""
        return self.priced.layout

    @property
    def microbatches(self) -> int:
        """Microbatches of a step."""
        return self.priced.plan.microbatches

    @property
    def rows_of_rank(self) -> int:
        """Rows of a microbatch on every data rank, the ``micro batch size``."""
        return self.rows // self.microbatches // self.layout.sizes["dp"]


@dataclass(frozen=True)
class WrittenFiles:
    """The files of an export.

    Attributes:
        files: their texts by name, relative to the folder.
        argv: what every rank runs, in the folder, behind the launcher.
        fill_in: what a person has to fill in: data and paths, nothing else.
        notes: what a reader should know, such as an option that only newer versions have.
    """

    files: Mapping[str, str]
    argv: tuple[str, ...]
    fill_in: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A file to be priced, as it is: nothing of it is imported or run.

    Attributes:
        path: where it was read from, for messages and for its suffix.
        text: its text.
    """

    path: Path
    text: str

    def error(self, name: str, what: str) -> ConfigError:
        """Return the one error about a field: what is wrong, with both numbers, and what to do."""
        return ConfigError(f"{self.path.name}: {name}: {what}")


@dataclass(frozen=True)
class Config:
    """What a trainer's file says.

    Attributes:
        words: those of a layout by name, flags with an empty value: ``{"tp": "8", "sp": "", "pp": "2", "zero": "1"}``.
            Without ``dp``: as many as the cluster's devices leave. ``mbs`` or ``m`` where the file says it.
        batch: rows of a step's batch over all ranks; None where the file does not say it.
        sequence: places of a row; None where the file does not say it.
        devices: the number of devices that it is for; None where the file does not say it.
        precision, optimizer: as the flags of ``autopar plan`` spell them; None where the file does not say it.
        model: sizes of the model that it states, by the names of Hugging Face configs (``hidden_size``,
            ``num_hidden_layers``, ...), which are compared with those of the model that is given.
        software: the trainer's record in hardware_profiles/data/software.toml where it is another one than the
            target's, such as that of an older release.
        unpriced: fields that change time or memory and that the price does not know, each with why; they are shown.
        ignored: names of known fields that change neither (paths, logging, learning rates).
    """

    words: Mapping[str, str]
    batch: int | None = None
    sequence: int | None = None
    devices: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    model: Mapping[str, int] = field(default_factory=dict)
    software: str | None = None
    unpriced: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def _fine(_layout: Layout, _model: ModelFacts) -> str:
    return ""


@dataclass(frozen=True)
class Target:
    """A trainer.

    Attributes:
        name: as the command line spells it: ``megatron``.
        title: its name and the version whose fields these are: ``Megatron-Core 0.19``.
        software: its record in hardware_profiles/data/software.toml, by which it is priced.
        words: the words of a layout that it can say, each with the values that a search tries, ``None`` for any
            number; the empty text stands for a flag, or for a word that is left out. A word that is no key cannot be
            said.
        refuses: returns why it cannot train this model in this layout, in one sentence with both numbers; empty if it
            can. The words are right already.
        write: writes the files that run a plan there.
        reads: whether a file is one of this trainer, by its suffix and its contents.
        read: reads it; raises :class:`ConfigError` with the field that is unknown or cannot be honoured.
        environment: what it wants of the environment of every rank.
        offloads: what its files can keep on the host: ``optimizer``, ``parameters`` (:mod:`.host_shares`).
    """

    name: str
    title: str
    software: str
    words: Mapping[str, tuple[str, ...] | None]
    write: Callable[[Export], WrittenFiles]
    refuses: Callable[[Layout, ModelFacts], str] = _fine
    reads: Callable[[Source], bool] | None = None
    read: Callable[[Source], Config] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    offloads: tuple[str, ...] = ()
