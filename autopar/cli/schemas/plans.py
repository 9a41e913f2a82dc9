"""Answers of ``show``, ``explain``, ``check``, ``memory`` and ``diff``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from autopar.cli.schemas.registry import Key, answer
from autopar.cli.schemas.stages import ProfiledShare, RequestedChoices, StepBytes, StepSeconds


@dataclass(frozen=True, kw_only=True)
class CollectiveEntry:
    """A collective of a step."""

    kind: Annotated[str, "all_reduce, all_gather, reduce_scatter, all_to_all, ..."]
    axis: Annotated[str, "axis of the mesh"]
    pass_: Annotated[str, Key("pass"), "forward or backward"]
    bytes: Annotated[int, "bytes of one rank's buffer"]


@dataclass(frozen=True, kw_only=True)
class OpEntry:
    """An operator of a block."""

    label: Annotated[str, "its name in the block"]
    module: Annotated[str, "path of its module"]
    source: Annotated[str, "file and line"]
    rule: Annotated[str, "factors of its tensors"]
    cuts: Annotated[dict[str, str], "factor by axis, for the axes that cut one"]
    ins: Annotated[list[str], "placements of inputs"]
    outs: Annotated[list[str], "placements of outputs"]
    steps: Annotated[list[str], "reshards of outputs: from -> to"]
    collectives: Annotated[list[CollectiveEntry], "inside of it, and of the reshards"]
    compute_seconds: Annotated[float, "forward and backward of one copy"]
    collective_seconds: Annotated[float, "collectives that do not overlap"]
    hidden_seconds: Annotated[float, "collectives that overlap"]
    beside: Annotated[list[str], "operators that they overlap with"]


@dataclass(frozen=True, kw_only=True)
class BlockEntry:
    """Operators that equal blocks share."""

    name: Annotated[str, "path of their modules"]
    count: Annotated[int, "number of equal blocks"]
    ops: Annotated[list[OpEntry], "in the order of execution"]


@dataclass(frozen=True, kw_only=True)
class OnHostEntry:
    """One kind of memory that a device of a stage keeps on its host."""

    stage: Annotated[int, "number of the stage"]
    what: Annotated[str, "activations, or parameters: with their gradients and the state of the optimizer"]
    bytes: Annotated[int, "for one device"]
    copy_seconds: Annotated[float, "of a step's copies out and in, each alone on the link"]
    waited_seconds: Annotated[float, "the part of a step that waits for them"]
    step_seconds: Annotated[float, "of the optimizer's step on the host"]


@dataclass(frozen=True, kw_only=True)
class ParameterEntry:
    """Parameters with one decision; bytes and seconds are of all of them on one rank."""

    name: Annotated[str, "name, or pattern of names"]
    count: Annotated[int, "number of parameters"]
    shape: Annotated[list[int], "whole shape"]
    dtype: Annotated[str, "format as the program reads it"]
    stored: Annotated[str, "placement between steps"]
    used: Annotated[str, "placement in operators"]
    lifetime: Annotated[str, "how long a gathered copy lives: step or use"]
    collectives: Annotated[list[CollectiveEntry], "gathers, and reductions of gradients"]
    stored_bytes: Annotated[int, "parameters, gradients and optimizer state"]
    seconds: Annotated[float, "their collectives, and copies between host and device"]
    on_host: Annotated[bool, "stored in the memory of the host, where the optimizer steps on them"] = False


@dataclass(frozen=True, kw_only=True)
class SolverVerdict:
    """The distance of a plan from the optimum."""

    solver: Annotated[str, "name of the solver"]
    status: Annotated[str, "optimal, within gap, best found or time limit"]
    objective_seconds: Annotated[float, "seconds by the integer program"]
    gap: Annotated[float, "distance from the bound, relative"]
    binds: Annotated[bool, "more memory may allow a faster plan"]


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """The operators that run again in the backward."""

    segments: Annotated[list[list[str]], "first and last operator of each segment"]
    seconds: Annotated[float, "seconds of a step"]


@dataclass(frozen=True, kw_only=True)
class WaitingTensors:
    """Tensors that wait elsewhere for the backward."""

    tensors: Annotated[list[str], "their names"]
    seconds: Annotated[float, "seconds of a step"]


@answer("show", "autopar show, for one mesh or with --stage")
@dataclass(frozen=True, kw_only=True)
class ShowAnswer:
    """A stage of a plan, operator by operator."""

    plan: Annotated[str, "path of the plan file"]
    model: Annotated[dict[str, Any] | None, "how the plan file names the model"]
    stage: Annotated[int, "number of the stage"]
    mesh: Annotated[dict[str, int], "size by axis"]
    cluster: Annotated[str, "the cluster that it is priced for"]
    blocks: Annotated[list[BlockEntry], "operators; equal blocks once"]
    parameters: Annotated[list[ParameterEntry], "parameters by decision"]
    seconds: Annotated[StepSeconds, "of a step on one rank"]
    bytes: Annotated[StepBytes, "of one rank"]
    collectives: Annotated[dict[str, int], "number in a step, by 'kind over axis'"]
    solution: Annotated[SolverVerdict | None, "null if the plan was edited by hand"]
    pins: Annotated[RequestedChoices, "choices that the user made"]
    notes: Annotated[list[str], "notes of the plan"]
    recompute: Annotated[Recomputation, "what runs again in the backward"]
    waiting: Annotated[dict[str, WaitingTensors], "by memory decision"] = field(default_factory=dict)
    on_host: Annotated[list[OnHostEntry], "what is in the memory of the host"] = field(default_factory=list)
    profile: Annotated[ProfiledShare | None, "only for clusters that are profiles"] = None


@answer("code", "autopar show --code")
@dataclass(frozen=True, kw_only=True)
class CodeAnswer:
    """The programs of the ranks, as Python."""

    code: Annotated[str, "all programs, one behind the other"]
    stages: Annotated[list[str], "the program of each stage"]


@dataclass(frozen=True, kw_only=True)
class HiddenCollectives:
    """Collectives of an operator that overlap computing."""

    seconds: float
    beside: Annotated[list[str], "operators that they overlap with"]


@dataclass(frozen=True, kw_only=True)
class PricedStrategy:
    """A strategy of an operator; null seconds: its neighbours cannot be reached."""

    cuts: Annotated[dict[str, str], "factor by axis, or replicate"]
    chosen: Annotated[bool, "the plan has it"]
    compute_seconds: Annotated[float | None, "the operator, with collectives inside of it"]
    reshard_seconds: Annotated[float | None, "reshards from and to its neighbours"]
    parameter_seconds: Annotated[float | None, "collectives of its parameters"]
    stored_bytes: Annotated[int, "parameters, gradients and optimizer state on one rank"]
    seconds: Annotated[float | None, "the sum"]


@dataclass(frozen=True, kw_only=True)
class ExplainedOp:
    """An operator, and what each of its strategies would cost."""

    stage: Annotated[int, "number of the stage"]
    op: Annotated[str, "its name"]
    copies: Annotated[int, "operators of equal blocks that are decided alike, this one included"]
    rule: Annotated[str, "factors of its tensors"]
    hidden: HiddenCollectives
    narrow: Annotated[str | None, "format in which it multiplies, if narrower"] = None
    source: Annotated[str, "file and line"]
    strategies: Annotated[list[PricedStrategy], "cheapest first"]


@dataclass(frozen=True, kw_only=True)
class PriceEntry:
    """The price of a stage: seconds and bytes of a step on one rank."""

    compute_seconds: Annotated[float, "forward and backward of operators"]
    activation_seconds: Annotated[float, "collectives of activations"]
    parameter_seconds: Annotated[float, "collectives of parameters"]
    hidden_seconds: Annotated[float, "the part of the latter that overlaps computing"]
    overhead_seconds: Annotated[float, "the executor"]
    optimizer_seconds: Annotated[float, "the optimizer's step"]
    parameter_bytes: Annotated[int, "stored parameters"]
    gradient_bytes: Annotated[int, "stored gradients of parameters"]
    optimizer_bytes: Annotated[int, "state of the optimizer"]
    gathered_bytes: Annotated[int, "parameters and their gradients as operators use them"]
    activation_bytes: Annotated[int, "kept for the backward"]
    again_bytes: Annotated[int, "the part of activation_bytes that is recomputed"]
    working_bytes: Annotated[int, "of operators while they run; may be negative"]
    buffer_bytes: Annotated[int, "buffers, caches among them, of a plan that runs forward alone"] = 0
    version_bytes: Annotated[int, "older weights of an asynchronous pipeline"] = 0


@dataclass(frozen=True, kw_only=True)
class ChangedStage:
    """A stage of the plan with the other strategy."""

    stage: Annotated[int, "its number"]
    seconds: Annotated[float, "forward and backward of a microbatch"]
    plan_seconds: Annotated[float, "the same of the plan"]
    memory_bytes: Annotated[int, "bytes of a device"]
    plan_memory_bytes: Annotated[int, "the same of the plan"]
    price: PriceEntry


@dataclass(frozen=True, kw_only=True)
class InsteadEntry:
    """The best plan with the strategy of ``--instead``, beside the plan."""

    wanted: Annotated[dict[str, str], "factor by axis"]
    ops: Annotated[int, "operators that got it"]
    plan_stages: Annotated[int, "stages of the plan"]
    seconds: Annotated[float, "seconds of a step"]
    plan_seconds: Annotated[float, "the same of the plan"]
    memory_bytes: Annotated[int, "bytes of the fullest device"]
    plan_memory_bytes: Annotated[int, "the same of the plan"]
    makespan_seconds: Annotated[float, "seconds of the schedule"]
    bubble_fraction: Annotated[float, "idle share, 0 to 1"]
    stages: Annotated[list[ChangedStage], "stages that were solved again"]


@answer("explain", "autopar explain PLAN OP")
@dataclass(frozen=True, kw_only=True)
class ExplainAnswer:
    """Why operators are cut as they are."""

    ops: Annotated[list[ExplainedOp], "the operators that the pattern names; equal ones once"]
    instead: Annotated[InsteadEntry | None, "null without --instead"]
    notes: Annotated[list[str], "why products of operators have the formats that they have"] = field(
        default_factory=list
    )
    on_host: Annotated[list[OnHostEntry], "what is in the memory of the host"] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class CountedCollectives:
    """Collectives of one kind over one axis."""

    axis: Annotated[str, "axis of the mesh"]
    kind: Annotated[str, "kind of the collective"]
    times: Annotated[int, "how often it runs"]


@dataclass(frozen=True, kw_only=True)
class CheckedStage:
    """The counts of a stage's program."""

    seconds: Annotated[float, "seconds of a step, recounted"]
    kept_bytes: Annotated[int, "kept for the backward, of one microbatch"]
    again_bytes: Annotated[int, "recomputed in the backward"]
    parameter_bytes: Annotated[int, "stored parameters"]
    gradient_bytes: Annotated[int, "stored gradients of parameters"]
    optimizer_bytes: Annotated[int, "state of the optimizer"]
    collectives: Annotated[list[CountedCollectives], "in the program"]
    failures: Annotated[list[str], "claims of the plan that do not hold"]


@answer("check", "autopar check")
@dataclass(frozen=True, kw_only=True)
class CheckAnswer:
    """The certificate of a plan: exit code 0 if it is certified, else 1."""

    certified: Annotated[bool, "every claim of the plan holds"]
    stages: Annotated[list[CheckedStage], "every stage"]
    peak_bytes: Annotated[int | None, "peak of the fullest device, counted by allocations; not for models without a "
                                      "backward"] = None  # fmt: skip
    peak_at: Annotated[str | None, "the operator at that moment"] = None


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """The memory of a device of a group at its peak."""

    group: Annotated[int, "number of the group"]
    stages: Annotated[list[int], "stages on it"]
    fullest_stage: Annotated[int, "the stage that runs at that moment"]
    moment: Annotated[str, "the moment in words"]
    categories: Annotated[dict[str, int], "bytes by category; they add up to bytes"]
    bytes: Annotated[int, "the peak"]
    limit_bytes: Annotated[float, "bytes that a plan may fill"]
    usable_bytes: Annotated[float, "bytes that a process can allocate"]
    reserved_bytes: Annotated[float, "of libraries and communicators"]
    margin: Annotated[float, "share that is left free for fragments, 0 to 1"]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Tensors of one operator or parameter in one category."""

    stage: Annotated[int, "number of the stage"]
    category: Annotated[str, "category of memory"]
    name: Annotated[str, "operator or parameter"]
    pieces: Annotated[int, "number of tensors"]
    module: Annotated[str, "path of the module"]
    bytes: Annotated[int, "all of them"]


@answer("memory", "autopar memory")
@dataclass(frozen=True, kw_only=True)
class MemoryAnswer:
    """The contents of the memory of a plan's devices."""

    plan: Annotated[str, "path of the plan file"]
    moment: Annotated[str, "where and when memory peaks"]
    groups: Annotated[list[GroupMemory], "every group of devices"]
    group: Annotated[int, "the group of tensors"]
    tensors: Annotated[list[TensorEntry], "the largest, largest first"]
    snapshot: Annotated[str | None, "what --snapshot wrote"]
    on_host: Annotated[list[OnHostEntry], "what is in the memory of the host"] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """A decision or number in which two plans differ; null where one has none."""

    what: str
    a: Annotated[Any, "in the first plan"]
    b: Annotated[Any, "in the second plan"]


@answer("diff", "autopar diff, of plans")
@dataclass(frozen=True, kw_only=True)
class DiffAnswer:
    """In what two plans differ; the list is empty if they are the same."""

    differences: list[PlanDifference]
    same_model: Annotated[bool, "the plans are for one model"]


@dataclass(frozen=True, kw_only=True)
class ProfileDifference:
    """An operator, or kind of operators, in two profiles."""

    what: str
    a_seconds: Annotated[float, "in the first profile"]
    b_seconds: Annotated[float, "in the second profile"]


@answer("diff-profiles", "autopar diff, of profiles")
@dataclass(frozen=True, kw_only=True)
class DiffProfilesAnswer:
    """In what two profiles differ."""

    rows: list[ProfileDifference]
    notes: Annotated[list[str], "where and when each was measured"]
