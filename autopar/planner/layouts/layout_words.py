"""Layouts in the words that people use: ``tp=8,sp,pp=16,dp=128,vp=8,zero=1,recompute=none``.

Each word pins what frameworks do under its name; nothing is searched.

    dp           replicas: the rows of the batch are cut over them
    tp           tensor parallelism as in Megatron-LM: columns, then rows of the weights, heads of attention, the
                 vocabulary of embedding, logits and loss; the residual and its norms are whole
    sp           with tp, the residual and its norms in shards of the sequence (Megatron's sequence parallelism)
    cp           context parallelism: everything in shards of the sequence. cp=4:ring (keys and values travel; the
                 default), cp=4:allgather (they are gathered), cp=4:ulysses (heads are exchanged for places)
    ep           so many of the ranks of dp share the routed experts of a layer: rows travel among them (all-to-all)
    etp          how routed experts are cut over tp: into pieces of their features (as many as tp; the default), or with
                 etp=1 not, and ep counts ranks of tp, too: rows travel among all of these in one exchange (with cp, in
                 two, over dp and over tp)
    pp, vp       groups of devices, and stages on each (interleaving); blocks are divided evenly, the embedding is in
                 the first stage, the head in the last
    zero         0 (the default): every rank of dp and cp has the parameters whole. 1: parameters, gradients of a step
                 and optimizer state are stored in shards; a step gathers parameters once and reduces gradients once.
                 2: the same, with one microbatch only. 3: parameters are gathered for every use
    fsdp         fully_shard: zero=3. fsdp=8: among so many neighbouring ranks of dp, with replicas of these (hybrid).
                 fsdp=keep: not resharded after the forward: with one microbatch only
    mbs          rows of the batch on every data rank in one microbatch; 1 unless it or m is given
    m, gas       microbatches of a step, instead of mbs
    schedule     1f1b (the default), interleaved-1f1b (with vp), zb-h1, gpipe, ...
    recompute    none (the default); full: every block is recomputed; full:2: the first two blocks of each stage;
                 every:2: every second block; selective:self_attn: modules of that name in every block (several with +)
    optimizer    adamw, adamw8bit, sgd, sgd_momentum
    precision    bf16-mixed and so on, as of ``--precision``; the model is captured for it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import lcm, prod

from autopar.errors import AutoparError, PlanError, closest
from autopar.planner.inter_op.simulating.order import SEARCHED, check_name
from autopar.planner.intra_op.pins.options import Options
from autopar.planner.layouts.operator_cuts import CONTEXT, DATA, EXPERT, RING, SHARD, TENSOR, WAYS
from autopar.planner.layouts.pinned_plan import Said
from autopar.planner.layouts.stage_starts import blocks_of, lists_of_blocks, numbered, sizes_of
from autopar.plans.plan_options import OPTIMIZERS
from autopar.rules.experts.expert_block import BLOCK
from autopar.words.graph import Graph
from autopar.words.meshes import Mesh
from autopar.words.precision import Precision, parse_precision
from cost_models.schedules import parse_kind
from cost_models.schedules.actions import check_size
from hardware_profiles.strict import Unreadable, parse_count, shortened

COUNTS = ("dp", "tp", "ep", "etp", "pp", "vp", "mbs", "m", "gas")
FLAGS = ("sp",)
OTHERS = ("cp", "zero", "fsdp", "schedule", "recompute", "optimizer", "precision")
WORDS = (*COUNTS, *FLAGS, *OTHERS)
NOT_SAID = {
    "offload": "what is kept on the host is said beside the layout: --offload, offload= of autopar.plan",
}
"""Words of frameworks that cannot be honoured, and what to write instead."""
NONE, FULL, SELECTIVE, EVERY = "none", "full", "selective", "every"


@dataclass(frozen=True)
class Layout:
    """A layout as its words say it; sizes are 1 where they do not.

    Attributes:
        text: the words.
        sizes: the sizes of ``dp``, ``cp``, ``tp``.
        experts: the part of ``dp`` whose ranks share routed experts: ``ep``, or of an ``ep`` that counts the ranks of
            ``tp``, too, what these leave.
        experts_travel: rows travel to routed experts over ``tp``, too (``etp=1``).
        shards: ranks of ``dp`` that share parameters, where these are not all of it (``fsdp=8``); else 1.
        groups: ``pp``; ``chunks``: ``vp``.
        rows: the rows of a microbatch on every data rank.
        microbatches: the number of them in a step; None if ``rows`` says it.
        is_default: neither was given, so that ``rows`` is 1.
        routed: a word that needs routed experts, such as ``etp=1``; empty for none.
        recompute: ``none``; or the recomputed blocks, ``full``, ``full:2``, ``every:2``, ``selective:self_attn``.
        keeps: parameters that are gathered for a use are kept until the backward.
    """

    text: str
    sizes: Mapping[str, int]
    experts: int
    experts_travel: bool
    shards: int
    groups: int
    chunks: int
    rows: int
    microbatches: int | None
    is_default: bool
    schedule: str
    routed: str
    recompute: str
    zero: int
    keeps: bool
    sequence_parallel: bool
    way: str
    optimizer: str | None
    precision: Precision | None

    @property
    def mesh(self) -> Mesh:
        """The mesh of every group; its last axis joins neighbours."""
        sizes = self.sizes
        axes = (
            (DATA, sizes["dp"] // self.experts // self.shards), (EXPERT, self.experts), (SHARD, self.shards),
            (CONTEXT, sizes["cp"]), (TENSOR, sizes["tp"]),
        )  # fmt: skip
        return Mesh((axis, size) for axis, size in axes if size > 1) or Mesh.of(data=1)

    @property
    def n_devices(self) -> int:
        """Devices of all groups."""
        return self.groups * prod(self.sizes.values())

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the routed experts of a layer, those of tensor parallelism too where rows go to them."""
        return self.experts * (self.sizes["tp"] if self.experts_travel else 1)

    @property
    def written(self) -> str:
        """The layout as messages name it."""
        return f"--like {self.text}"

    def microbatches_of(self, rows: int) -> int:
        """Return into how many microbatches a batch of `rows` rows is cut."""
        each = self.sizes["dp"] * self.rows
        count = self.microbatches or rows // each
        if count < 1 or rows % count or (self.microbatches is None and rows % each):
            request = f"m={count}" if self.microbatches else f"dp={self.sizes['dp']} with mbs={self.rows}"
            raise PlanError(f"{self.written}: a batch of {rows} rows cannot be cut by {request}; use what divides it")
        if rows // count % self.sizes["dp"]:
            raise PlanError(
                f"{self.written}: {count} microbatches of {rows} rows have {rows // count} each, which do not divide "
                f"over dp={self.sizes['dp']}; use a divisor of {rows // self.sizes['dp'] or 1} for m"
            )
        try:
            check_size(self.groups, count)
        except ValueError as error:
            raise PlanError(f"{self.written}: {error}; mbs=2 and more make fewer microbatches") from None
        return count

    def check_devices(self, n_devices: int) -> None:
        """Refuse a layout for another number of devices."""
        if self.n_devices != n_devices:
            sizes = (*self.sizes.items(), ("pp", self.groups))
            words = " x ".join(f"{w}={n}" for w, n in sizes if n > 1) or "nothing"
            raise PlanError(
                f"{self.written}: {words} makes {self.n_devices} devices, the cluster has {n_devices}; change one of "
                "the sizes"
            )

    def said(self, graph: Graph, options: Options, n_devices: int, rows: int) -> Said:
        """Return what the words say of a graph.

        Args:
            graph: the graph of the model, at any number of rows.
            options: the memory limit and the optimizer, where no word says another one.
            n_devices: the number of devices of the cluster.
            rows: the rows of a step's batch.
        """
        self.check_devices(n_devices)
        if self.routed and all(node.target != BLOCK for _, node in graph.of_kind("op")):
            raise PlanError(f"{self.written}: {self.routed} needs routed experts, the model has none; leave it out")
        m = self.microbatches_of(rows)
        if self.keeps and m > 1:
            raise PlanError(
                f"{self.written}: with {m} microbatches parameters are gathered once a step or once a use, not once a "
                "microbatch; write zero=1 or fsdp"
            )
        if self.zero == 2 and m > 1:
            raise PlanError(
                f"{self.written}: with {m} microbatches gradients are whole until the step ends, as under ZeRO-1; "
                "write zero=1, zero=3 or m=1"
            )
        options = replace(
            options, recompute=self._recomputed(graph), optimizer=self.optimizer or options.optimizer, microbatches=m,
        )  # fmt: skip
        return Said(
            self.written, self.text, self.mesh, self.groups, self.chunks, self.schedule, m,
            1 if self.zero == 2 else self.zero, self.sequence_parallel, self.way, self.experts_travel, options,
        )  # fmt: skip

    def _recomputed(self, graph: Graph) -> tuple[str, ...]:
        """Return the patterns of modules that are recomputed."""
        kind, _, which = self.recompute.partition(":")
        if kind == NONE:
            return ()
        lists = lists_of_blocks(graph)
        if not lists:
            raise PlanError(f"{self.written}: no modules of the model repeat; write recompute=none")
        if kind == FULL and not which:
            return tuple(f"{name}.*" if name else "*" for name in lists)
        if kind == SELECTIVE:
            parts = [part.strip() for part in which.split("+")]
            _check_there(self.written, parts, lists, graph)
            return tuple(f"{name}.*.{part}" for name in lists for part in parts)
        blocks = list(blocks_of(graph))
        n = int(which)
        if kind == EVERY:
            if n > len(blocks):
                raise PlanError(
                    f"{self.written}: this would run none of the model's {len(blocks)} blocks again; "
                    "write a smaller number, or recompute=none"
                )
            return tuple(blocks[n - 1 :: n])
        sizes = sizes_of(len(blocks), self.groups * self.chunks)
        if not 0 < n <= max(sizes):
            raise PlanError(
                f"{self.written}: a stage has {max(sizes)} blocks at most; write 1 to "
                f"{max(sizes)}, or recompute={FULL} for all"
            )
        chosen: list[str] = []
        done = 0
        for size in sizes:
            chosen += blocks[done : done + min(size, n)]
            done += size
        return tuple(chosen)


def words_of(text: str) -> dict[str, str]:
    """Return the words of a layout by name; flags have an empty value."""
    parts = (part.partition("=")[::2] for part in text.split(","))
    return {word.strip(): value.strip() for word, value in parts}


def parse_layout(text: str) -> Layout:
    """Return a layout from its words.

    Raises:
        PlanError: a word is unknown, has a wrong value, or cannot be honoured.
    """
    written = f"--like {shortened(text)}"
    given: dict[str, str] = {}
    for part in text.split(","):
        word, equals, value = (p.strip() for p in part.partition("="))
        if word in NOT_SAID:
            raise PlanError(f"{written}: {word}: {NOT_SAID[word]}")
        if word not in WORDS:
            raise PlanError(f"{written}: '{part.strip()}' is no word of a layout; {closest(word, WORDS)}")
        if word in given:
            raise PlanError(f"{written}: '{word}' stands there twice")
        if word in FLAGS and equals:
            raise PlanError(f"{written}: {word} is '{value}'; write {word} alone")
        given[word] = value
    numbers = {word: _count(written, word, given[word]) for word in COUNTS if word in given}
    if sum(word in numbers for word in ("m", "gas", "mbs")) > 1:
        raise PlanError(f"{written}: mbs, m and gas say the same; give one of them")
    cp, way = _context(written, given.get("cp"))
    sizes = {"dp": numbers.get("dp", 1), "cp": cp, "tp": numbers.get("tp", 1)}
    if "sp" in given and sizes["tp"] == 1:
        raise PlanError(f"{written}: sp cuts the residual over the ranks of tp, which is 1; give tp=2 or more, or cp")
    groups = numbers.get("pp", 1)
    schedule, chunks = _schedule(written, given.get("schedule"), groups, numbers.get("vp"))
    experts, travel = _experts(written, numbers)
    if sizes["dp"] % experts:
        shown = f"dp={sizes['dp']}" if "dp" in numbers else "dp, 1 where it is not given"
        raise PlanError(
            f"{written}: ep={experts} does not divide {shown}; rows travel to experts among ranks of dp, so dp counts "
            f"them, too: dp={lcm(experts, sizes['dp'])},ep={experts}"
        )
    zero, keeps, shards = _zero(written, given, sizes["dp"])
    if shards > 1 and experts > 1:
        raise PlanError(f"{written}: fsdp={shards} beside ep={experts} cannot be said; write fsdp (among all of dp)")
    optimizer = given.get("optimizer")
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise PlanError(f"{written}: optimizer is '{optimizer}'; use {', '.join(OPTIMIZERS)}")
    try:
        precision = parse_precision(given["precision"]) if "precision" in given else None
    except AutoparError as error:
        raise PlanError(f"{written}: {error}") from None
    return Layout(
        text, sizes, experts, travel, shards, groups, chunks, numbers.get("mbs", 1),
        numbers.get("m", numbers.get("gas")), not numbers.keys() & {"mbs", "m", "gas"},
        schedule, next((f"{word}={numbers[word]}" for word in ("ep", "etp") if numbers.get(word, 1) > 1
                        or word == "etp" in numbers), ""),
        _recompute(written, given.get("recompute", NONE)), zero, keeps, "sp" in given, way, optimizer, precision,
    )  # fmt: skip


def _count(written: str, word: str, value: str) -> int:
    try:
        number = parse_count(value)
    except Unreadable:
        number = 0
    if not number:
        raise PlanError(
            f"{written}: {word} is '{shortened(value)}'; give a whole number of 1 or more: {word}=8"
        )
    return number


def _experts(written: str, numbers: Mapping[str, int]) -> tuple[int, bool]:
    """Return how many ranks of ``dp`` share routed experts, and whether rows are sent over ``tp``, too."""
    ep, tp, etp = numbers.get("ep", 1), numbers.get("tp", 1), numbers.get("etp")
    if etp in (None, tp):
        return ep, False
    if etp != 1:
        raise PlanError(f"{written}: etp={etp} is neither 1 nor tp={tp}; write one of these")
    if ep % tp:
        raise PlanError(f"{written}: with etp=1 rows travel over tp, too, so ep={ep} has to be a multiple of tp={tp}")
    return ep // tp, True


def _context(written: str, value: str | None) -> tuple[int, str]:
    size, colon, way = (value or "1").partition(":")
    if colon and way not in WAYS:
        raise PlanError(f"{written}: cp is '{value}'; after the number stands {', '.join(WAYS)}: cp=4:{RING}")
    return _count(written, "cp", size), way or RING


def _zero(written: str, given: Mapping[str, str], dp: int) -> tuple[int, bool, int]:
    """Return ``zero``, whether gathered parameters are kept until the backward, and how many ranks share them."""
    value = given.get("zero", "0")
    if "fsdp" not in given:
        if value not in ("0", "1", "2", "3"):
            raise PlanError(f"{written}: zero is '{value}'; write zero=0, 1, 2 or 3")
        return int(value), False, 1
    if "zero" in given:
        raise PlanError(f"{written}: fsdp is zero=3; give one of them")
    how = given["fsdp"]
    if how == "keep":
        return 1, True, 1
    if not how:
        return 3, False, 1
    if not how.isdecimal():
        raise PlanError(f"{written}: fsdp is '{how}'; write fsdp, fsdp=8 (among 8 ranks of dp), or fsdp=keep (not "
                        "resharded after the forward)")  # fmt: skip
    shards = _count(written, "fsdp", how)
    if dp % shards:
        raise PlanError(f"{written}: fsdp={shards} does not divide dp={dp}; use a divisor")
    return 3, False, shards if shards < dp else 1


def _schedule(written: str, name: str | None, groups: int, vp: int | None) -> tuple[str, int]:
    """Return the schedule, and the stages on each group: ``vp``, or as many as it always has (two under ``zb-v``)."""
    if vp is not None and vp > 1 and groups == 1:
        raise PlanError(f"{written}: vp={vp} needs a pipeline; give pp=2 or more")
    name = name or ("interleaved-1f1b" if vp is not None and vp > 1 else "1f1b")
    if name == SEARCHED:
        raise PlanError(f"{written}: schedule={SEARCHED} is no pinned one; leave --like out for a search")
    try:
        check_name(name)
    except PlanError as error:
        raise PlanError(f"{written}: {error}") from None
    kind, stages = parse_kind(name)
    if stages is not None and (groups == 1 or (vp or stages) != stages):
        other = f"vp={vp}" if groups > 1 else "pp=1"
        raise PlanError(f"{written}: {name} puts {stages} stages on each of several groups, beside {other}; "
                        "change one of them")  # fmt: skip
    chunks = vp or stages or (kind.fewest if kind.fewest == kind.most and groups > 1 else 1)
    if not kind.allows_degree(chunks):
        several = "" if kind.fewest == kind.most else " or more"
        raise PlanError(
            f"{written}: {name} puts {kind.fewest}{several} stages on each of several groups, pp={groups} "
            f"with vp={chunks} are asked for; change one of them"
        )
    base = name.partition(":")[0]
    full = f"{base}:{chunks}" if chunks > 1 and kind.fewest != kind.most else base
    return full, chunks


def _recompute(written: str, value: str) -> str:
    kind, colon, which = value.partition(":")
    fine = {
        NONE: not colon, FULL: not colon or which.isdecimal(), EVERY: which.isdecimal() and int(which) > 0,
        SELECTIVE: bool(which),
    }.get(kind, False)  # fmt: skip
    if value == SELECTIVE:
        raise PlanError(
            f"{written}: recompute={SELECTIVE}: name the modules of a block that run again, such as "
            f"recompute={SELECTIVE}:self_attn; what attention has inside is never kept where it is one kernel "
            "(scaled_dot_product_attention): then recompute=none says it"
        )
    if not fine:
        raise PlanError(
            f"{written}: recompute is '{value}'; use none, full, full:2 (blocks of each stage), every:2 or "
            "selective:MODULE"
        )
    return value


def _check_there(written: str, parts: Sequence[str], lists: Sequence[str], graph: Graph) -> None:
    """Refuse modules to recompute that no block has."""
    modules = {node.module for _, node in graph.of_kind("op")}
    inside = {path for module in modules for path in _with_parents(module) if numbered(path)[1] in lists}
    for part in parts:
        if not any(fnmatchcase(path, f"{name}.*.{part}") for name in lists for path in inside):
            known = sorted({path.removeprefix(numbered(path)[0]).strip(".") for path in inside} - {""})
            raise PlanError(
                f"{written}: no block has a module '{part}'; {closest(part, known)}"
            )


def _with_parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
