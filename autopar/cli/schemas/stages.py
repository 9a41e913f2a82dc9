"""The answer about a plan in stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from autopar.cli.schemas.registry import Key, answer


@dataclass(frozen=True, kw_only=True)
class RequestedChoices:
    """Choices that the user made; empty or null where the planner chose."""

    stages: Annotated[int | None, "groups of devices"]
    cuts: Annotated[list[str], "what all stages but the first begin with"]
    schedules: Annotated[list[str], "names of schedules to choose from"]
    microbatches: Annotated[int | None, "microbatches of a step"]
    mesh: Annotated[list[list[Any]] | None, "axes of the mesh, each as a name and a size"]
    ops: Annotated[dict[str, dict[str, str]], "factor by axis, by pattern of operators"]
    params: Annotated[dict[str, str], "placement by pattern of parameters"]
    inputs: Annotated[dict[str, Any], "placement by input"]
    outputs: Annotated[dict[str, Any], "placement by position of the output"]
    memory_limit_bytes: Annotated[int | None, "limit of a device in bytes"]
    recompute: Annotated[list[str], "patterns of modules that are recomputed in the backward"]
    precision: Annotated[dict[str, Any] | None, "formats of parameters, masters, moments, reductions"]
    expert_load: Annotated[dict[str, Any], "shares of rows of routed experts, by pattern of modules"]
    layout: Annotated[str, "the words of the layout; empty for a plan that was searched"] = ""
    target: Annotated[str, "the trainer that the plan is for; empty for autopar's own runtime"] = ""
    offload: Annotated[str, "what may be kept on the host, such as optimizer=0.5; empty if nothing"] = ""
    mode: Annotated[str, "inference for a plan that runs forward alone; empty for one of training"] = ""


@dataclass(frozen=True, kw_only=True)
class StageEntry:
    """A stage: seconds of one microbatch, and bytes of one of its devices."""

    stage: Annotated[int, "its number"]
    group: Annotated[int, "the group of devices that it runs on"]
    first: Annotated[str, "name of its first operator in the graph"]
    begins_at: Annotated[str, "the same operator by its module"]
    devices: Annotated[list[int], "numbers of its devices"]
    mesh: Annotated[dict[str, int], "size by axis"]
    forward_seconds: Annotated[float, "forward of a microbatch"]
    input_seconds: Annotated[float, "the part of the backward that gives gradients of inputs"]
    weight_seconds: Annotated[float, "the part of the backward that gives gradients of parameters"]
    backward_seconds: Annotated[float, "backward of a microbatch"]
    step_seconds: Annotated[float, "once a step: exposed collectives of parameters, and the optimizer"]
    parameter_seconds: Annotated[float, "collectives of parameters, by themselves"]
    hidden_seconds: Annotated[float, "the part of collectives that overlaps computing"]
    optimizer_seconds: Annotated[float, "the optimizer's step"]
    in_flight: Annotated[int, "most microbatches between their forward and backward"]
    parameter_bytes: Annotated[int, "stored parameters"]
    gradient_bytes: Annotated[int, "stored gradients of parameters"]
    optimizer_bytes: Annotated[int, "state of the optimizer"]
    gathered_bytes: Annotated[int, "parameters and their gradients as operators use them"]
    version_bytes: Annotated[int, "older weights, of an asynchronous pipeline"]
    activation_bytes: Annotated[int, "kept for the backward, of all microbatches in flight"]
    microbatch_bytes: Annotated[int, "kept for the backward, of one microbatch"]
    working_bytes: Annotated[int, "of operators while they run; negative: not all of the others is there at once"]
    memory_bytes: Annotated[int, "all of these: the peak of the stage"]
    limit_bytes: Annotated[float, "limit of the stage"]
    device_bytes: Annotated[int, "peak of a device of the group, with its other stages"]
    device_limit_bytes: Annotated[float, "limit of a device of the group"]


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """Parts of a step's seconds: even, uneven, waiting and once add up to it."""

    seconds: Annotated[float, "the whole step"]
    even_seconds: Annotated[float, "computing, if all groups computed equally long"]
    uneven_seconds: Annotated[float, "what the slowest group computes more"]
    waiting_seconds: Annotated[float, "the slowest group waits for others and for transfers"]
    once_seconds: Annotated[float, "optimizer, and exposed collectives of parameters"]
    bubble_fraction: Annotated[float, "idle share of all groups, 0 to 1"]
    busy_seconds: Annotated[list[float], "computing of each group"]
    busiest_group: Annotated[int, "the slowest group"]


@dataclass(frozen=True, kw_only=True)
class StageTransfer:
    """A transfer of a microbatch between two stages."""

    source: Annotated[int, "stage that sends in the forward"]
    target: Annotated[int, "stage that receives in the forward"]
    forward_seconds: Annotated[float, "activations"]
    backward_seconds: Annotated[float, "gradients"]


@dataclass(frozen=True, kw_only=True)
class ProfiledShare:
    """The share of a price that comes from measurements of a profile."""

    measured_seconds: Annotated[float, "seconds of operators that were measured"]
    computed_seconds: Annotated[float, "seconds of operators that formulas give"]
    date: Annotated[str, "date of the profile"]
    processor: Annotated[str, "device of the profile"]


@dataclass(frozen=True, kw_only=True)
class StagesForm:
    """The common part of answers about plans in stages."""

    schedule: Annotated[str, "its name"]
    microbatches: Annotated[int, "of a step"]
    devices: Annotated[int, "number of devices"]
    groups: Annotated[int, "number of groups of devices"]
    cluster: Annotated[str, "the cluster that it is priced for"]
    pins: Annotated[RequestedChoices, "choices that the user made"]
    seconds: Annotated[float, "seconds of a step"]
    makespan_seconds: Annotated[float, "seconds of the schedule, without what is done once a step"]
    bubble_fraction: Annotated[float, "idle share of the schedule, 0 to 1"]
    idle_seconds: Annotated[list[float], "idle seconds of each group"]
    step: Annotated[StepParts, "where the seconds go"]
    stages: Annotated[list[StageEntry], "every stage"]
    axes: Annotated[dict[str, dict[str, float]], "by axis, share of the work that it cuts by batch, sequence, ..."]
    transfers: Annotated[list[StageTransfer], "transfers between stages"]
    notes: Annotated[list[str], "notes of the plan"]
    profile: Annotated[ProfiledShare | None, "only for clusters that are profiles"] = None


@answer("simulate", "autopar simulate", "autopar show, for a plan in stages")
@dataclass(frozen=True, kw_only=True)
class SimulateAnswer(StagesForm):
    """A simulated step of a plan, by stages."""

    trace: Annotated[str | None, "the written timeline; null if none was asked for"] = None


@dataclass(frozen=True, kw_only=True)
class NeighbourStage:
    """A stage beside a cut that was moved."""

    stage: Annotated[int, "its number"]
    seconds: Annotated[float, "forward and backward of a microbatch"]
    memory_bytes: Annotated[int, "bytes of one device"]


@dataclass(frozen=True, kw_only=True)
class MovedCut:
    """The step with the cut elsewhere, or why that is impossible."""

    blocks: Annotated[int, "by how many blocks the cut moved: -1 is earlier"]
    begins_at: Annotated[str | None, "operator at which the stage would begin"]
    seconds: Annotated[float | None, "seconds of the step; null if impossible"]
    why_not: Annotated[str | None, "why it is impossible"]
    bubble_fraction: Annotated[float | None, "idle share, 0 to 1"] = None
    stages: Annotated[list[NeighbourStage] | None, "the stages on both sides"] = None


@dataclass(frozen=True, kw_only=True)
class ExplainedCut:
    """A cut between two stages."""

    stage: Annotated[int, "the stage that begins there"]
    begins_at: Annotated[str, "its first operator"]
    pinned: Annotated[bool, "the user asked for cuts"]
    arriving_bytes: Annotated[int, "bytes of a microbatch that cross the cut"]
    forward_seconds: Annotated[float, "their transfer"]
    backward_seconds: Annotated[float, "the transfer of their gradients"]
    instead: Annotated[list[MovedCut], "the cut one block earlier and later"]


@answer("explain-cut", "autopar explain PLAN stage:N")
@dataclass(frozen=True, kw_only=True)
class ExplainCutAnswer(StagesForm):
    """Why a stage begins where it does."""

    cut: ExplainedCut


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds of a step on one rank."""

    compute: Annotated[float, "forward and backward of operators"]
    activation_collectives: Annotated[float, Key("activation collectives"), "collectives of activations"]
    parameter_collectives: Annotated[float, Key("parameter collectives"), "collectives of parameters"]
    hidden: Annotated[float, Key("of these beside computing"), "the part of the latter that overlaps computing"]
    executor: Annotated[float, Key("executor and sums of gradients"), "what the executor takes"]
    optimizer: Annotated[float, "the optimizer's step"]
    step: Annotated[float, "the whole step: the sum, less what is hidden"]


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of one rank at the peak of a step."""

    parameters: Annotated[int, "stored parameters"]
    gradients: Annotated[int, "stored gradients of parameters"]
    optimizer: Annotated[int, "state of the optimizer"]
    gathered: Annotated[int, "parameters and their gradients as operators use them"]
    activations: Annotated[int, "kept for the backward"]
    working_memory: Annotated[int, Key("working memory"), "of operators while they run; may be negative"]
    total: Annotated[int, "the sum: the peak"]
