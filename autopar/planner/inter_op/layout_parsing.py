"""Layouts in the words that people use, as wishes for a pipeline: ``tp=8,pp=16,dp=128,vp=8,zero=1,sp,recompute=none``.

    tp, dp, cp      sizes of the axes tensor, data and context of every group's mesh
    ep              so many of the ranks of dp share the routed experts of a layer: rows travel among them (all-to-all)
    pp              groups of devices; vp stages on each (interleaving)
    mbs             rows of the batch on every data rank in one microbatch; 1 unless it is given
    m               microbatches of a step, instead of mbs
    schedule        1f1b, zb-h1, ...; by default 1f1b, or interleaved-1f1b where vp is more than 1
    recompute       none; full: every block of the model runs again; selective: operators that the planner chooses,
                    as where nothing is given
    zero, sp        accepted and left to the planner, which keeps every parameter and cuts every sequence as is cheapest
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm

from autopar.errors import PlanError, closest
from autopar.planner.inter_op.candidates import PipelineOptions
from autopar.planner.inter_op.simulating.order import check_name
from autopar.rules.experts.expert_block import BLOCK, TRAVEL
from autopar.rules.registry import rules_of
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from cost_models.schedules.actions import check_size
from hardware_profiles.strict import Unreadable, parse_count, shortened

AXES = {"dp": "data", "tp": "tensor", "cp": "context"}
EXPERT_AXIS = "expert"
"""The part of data parallelism along which rows travel to experts."""
NUMBERS = (*AXES, "ep", "pp", "vp", "mbs", "m")
WORDS = (*NUMBERS, "schedule", "recompute", "zero", "sp")


@dataclass(frozen=True)
class Layout:
    """A layout as it was asked for; sizes of axes are 1 where they were not.

    Attributes:
        sizes: of the axes ``dp``, ``tp`` and ``cp``.
        experts: ``ep``, a part of ``dp``.
        groups: ``pp``.
        rows: of a microbatch on every data rank.
        microbatches: of a step; None where ``rows`` says it.
        is_default: neither was given, so that ``rows`` is 1.
        free: words that name what the planner decides all the same.
    """

    text: str
    sizes: Mapping[str, int]
    experts: int
    groups: int
    rows: int
    microbatches: int | None
    is_default: bool
    schedule: str
    recompute: str | None
    free: tuple[str, ...]

    @property
    def mesh(self) -> Mesh:
        """Of every group."""
        (data, n), *others = ((AXES[word], size) for word, size in self.sizes.items())
        axes = ((data, n // self.experts), (EXPERT_AXIS, self.experts), *others)
        return Mesh((axis, size) for axis, size in axes if size > 1) or Mesh.of(data=1)

    @property
    def n_devices(self) -> int:
        """Of all groups."""
        n = self.groups
        for size in self.sizes.values():
            n *= size
        return n

    def microbatches_of(self, rows: int) -> int:
        """Into how many microbatches a batch of so many rows is cut.

        Raises:
            PlanError: it does not divide.
        """
        each = self.sizes["dp"] * self.rows
        count = self.microbatches or rows // each
        if count < 1 or rows % count or (self.microbatches is None and rows % each):
            asked = f"m={count}" if self.microbatches else f"dp={self.sizes['dp']} with mbs={self.rows}"
            raise PlanError(f"--like {self.text}: a batch of {rows} rows cannot be cut by {asked}; use what divides it")
        try:
            check_size(self.groups, count)
        except ValueError as error:
            raise PlanError(f"--like {self.text}: {error}; mbs=2 and more make fewer microbatches") from None
        return count

    def asked(self, graph: Graph, base: PipelineOptions, n_devices: int, rows: int) -> PipelineOptions:
        """The wishes, with what ``base`` says of memory and the optimizer.

        Args:
            graph: of the model, at any number of rows.

        Raises:
            PlanError: the layout is for another number of devices, the rows do not divide, there are no blocks to
                recompute, or no experts.
        """
        if self.n_devices != n_devices:
            words = " x ".join(f"{w}={n}" for w, n in (*self.sizes.items(), ("pp", self.groups)) if n > 1) or "nothing"
            raise PlanError(
                f"--like {self.text}: {words} makes {self.n_devices} devices, the cluster has {n_devices}; change one "
                "of the sizes"
            )
        options = base.options
        if self.recompute == "full":
            options = replace(options, recompute=(block_pattern(graph, self.text),))
        if self.experts > 1:
            pins = {f"{module}:*": {EXPERT_AXIS: TRAVEL} for module in self._experts(graph)}
            options = replace(options, constraints={**(options.constraints or {}), **pins})
        return replace(
            base, microbatches=self.microbatches_of(rows), groups=self.groups, mesh=self.mesh, options=options,
            schedules=(self.schedule,), may_recompute=self.recompute in (None, "selective"),
        )  # fmt: skip

    def _experts(self, graph: Graph) -> list[str]:
        """The modules that hold routed experts which rows may travel to."""
        blocks = [(i, node) for i, node in graph.of_kind("op") if node.target == BLOCK]
        if not blocks:
            raise PlanError(f"--like {self.text}: ep={self.experts} needs routed experts, the model has none")
        n = min(rule.sizes[TRAVEL] for i, _ in blocks if (rule := rules_of(graph)[i]) is not None)
        if n % self.experts:
            raise PlanError(f"--like {self.text}: {n} experts do not divide over ep={self.experts}; use a divisor")
        return [node.module for _, node in blocks]


def parse_layout(text: str) -> Layout:
    """A layout from its words.

    Raises:
        PlanError: a word is unknown, has a wrong value, or cannot be honoured yet.
    """
    numbers: dict[str, int] = {}
    others: dict[str, str] = {}
    free = []
    for part in text.split(","):
        word, equals, value = (p.strip() for p in part.partition("="))
        if word not in WORDS:
            raise PlanError(f"--like {text}: '{part.strip()}' is no word of a layout; {closest(word, WORDS)}")
        if word in numbers or word in others or word in free:
            raise PlanError(f"--like {text}: '{word}' stands there twice")
        if word in NUMBERS:
            try:
                numbers[word] = parse_count(value)
            except Unreadable:
                numbers[word] = 0
            if not numbers[word]:
                raise PlanError(
                    f"--like {shortened(text)}: {word} is '{shortened(value)}'; give a whole number of 1 or more: "
                    f"{word}=8"
                )
        elif (word == "sp" and not equals) or (word == "zero" and value in ("0", "1", "2", "3")):
            free.append(part.strip())
        elif word in ("zero", "sp"):
            wanted = "zero=0, 1, 2 or 3" if word == "zero" else "sp alone"
            raise PlanError(f"--like {text}: {word} is '{value}'; write {wanted}")
        else:
            others[word] = value
    recompute = others.get("recompute")
    if recompute not in (None, "none", "selective", "full"):
        raise PlanError(f"--like {text}: recompute is '{recompute}'; use none, selective or full")
    if "m" in numbers and "mbs" in numbers:
        raise PlanError(f"--like {text}: mbs and m say the same; give one of them")
    groups, deep = numbers.get("pp", 1), numbers.get("vp", 1)
    schedule = others.get("schedule") or ("interleaved-1f1b" if deep > 1 else "1f1b")
    if deep > 1:
        if groups == 1:
            raise PlanError(f"--like {text}: vp={deep} needs a pipeline; give pp=2 or more")
        schedule = f"{schedule}:{deep}"
    check_name(schedule)
    sizes, experts = {word: numbers.get(word, 1) for word in AXES}, numbers.get("ep", 1)
    if sizes["dp"] % experts:
        written = f"dp={sizes['dp']}" if "dp" in numbers else "dp, 1 where it is not given"
        raise PlanError(
            f"--like {text}: ep={experts} does not divide {written}; rows travel to experts among ranks of dp, so dp "
            f"counts them, too: dp={lcm(experts, sizes['dp'])},ep={experts}"
        )
    return Layout(
        text, sizes, experts, groups, numbers.get("mbs", 1), numbers.get("m"), not numbers.keys() & {"mbs", "m"},
        schedule, recompute, tuple(free),
    )  # fmt: skip


def block_pattern(graph: Graph, text: str) -> str:
    """The pattern of the modules that repeat most: ``model.layers.*``.

    Raises:
        PlanError: there are none; ``text`` is the layout that asked for them.
    """
    counts: Counter[str] = Counter()
    for node in graph.nodes:
        parts = node.module.split(".") if node.kind == "op" and node.module else []
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number:
            counts[".".join(parts[:number])] += 1
    if not counts:
        raise PlanError(f"--like {text}: no modules of the model repeat; say which run again with --recompute")
    return f"{counts.most_common(1)[0][0]}.*"


__all__ = ["Layout", "block_pattern", "parse_layout"]
