"""Every private name of torch and spmd-types that autopar uses, in one place, which a test enforces.

A private name may disappear in the next release. When torch changes, this is the file to check: each name says what it
is used for, so that a replacement can be found. Slow imports happen on first use.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple
from unittest import mock

# The module in which spmd-types looks up functional collectives: see :func:`_call_by_new_names`.
import spmd_types._collectives as collectives_of_spmd_types
import torch

# The transforms of functions (vmap, grad), and the index values in one that makes a mask.
import torch._dynamo._trace_wrapped_higher_order_op as places_in_masks
import torch._functorch.apis as functorch_apis
import torch._functorch.eager_transforms as functorch_transforms
import torch.distributed as dist

# Collectives as functions of a tensor and a group, for the maximum over ranks inside an operator of autopar.
import torch.distributed._functional_collectives as functional_collectives

# The process group of an axis of the ambient mesh.
from spmd_types._mesh import _pg_for_axis as group_of_axis

# Hides calls from function modes and tensor subclasses: autopar's own look at tensors is not the model's.
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass

# --- autograd --------------------------------------------------------------------------------------------------------
# True inside vmap, grad or the like, which change the behaviour of an autograd.Function.
from torch._C import _are_functorch_transforms_active as functorch_is_active

# Skips to the computing kernel from the autograd kernel of autopar's own operators.
from torch._C import _AutoDispatchBelowAutograd as below_autograd  # type: ignore[attr-defined]

# The number of the running backward, -1 outside of any: gradients of several backwards must not be mixed.
from torch._C import _current_graph_task_id as current_backward

# True if an operator is composed of others, so that it can return a view of its argument.
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel

# Allows a plain tensor as an operand next to a DTensor, in this thread.
from torch._C import _set_dtensor_allow_implicit_replication as allow_plain_tensors  # type: ignore[attr-defined]

# True if the running backward will reach a node: a stage waits only for gradients that will arrive.
from torch._C import _will_engine_execute_node as _will_run  # type: ignore[attr-defined]

# True if the running backward retains its graph.
from torch._C._autograd import _get_current_graph_task_keep_graph as keeps_graph

# The active hooks on saved tensors, to be applied again inside others.
from torch._C._autograd import _top_saved_tensors_default_hooks as top_saved_tensors_hooks

# The ``torch.compile`` callback within which a parallel module is called.
from torch._C._dynamo.eval_frame import get_eval_frame_callback as callers_compiler

# True of a tensor that vmap, grad or the like hands to the function.
from torch._C._functorch import is_functorch_wrapped_tensor as is_transformed

# The device and dtype in the arguments of ``module.to``.
from torch._C._nn import _parse_to as arguments_of_to  # type: ignore[attr-defined]

# isort: off   each import keeps the comment that says what it is for
# --- operators and nested values -------------------------------------------------------------------------------------
# The types of operators, for annotations and to tell operators from other functions.
from torch._ops import OpOverload, OpOverloadPacket

# --- fake tensors, modes and subclasses ------------------------------------------------------------------------------
# Tensors with shapes and without values, on which programs run to be checked and counted.
# Inside, tensors that are made are real: values of constants are looked at while a trace is on.
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)

# Regathering a tensor that autograd saved must not count as a change of it: the values are the same.
from torch.autograd import _unsafe_preserve_version_counter as preserve_version_counter

# The class from which every autograd.Function has its ``apply``: calls are recorded there.
from torch.autograd.function import _SingleLevelFunction as SingleLevelFunction

# True while a compiler traces, so that collectives must be functional.
from torch.distributed._functional_collectives import _are_we_tracing as compiler_traces

# --- ranks -----------------------------------------------------------------------------------------------------------
# All ranks of a mesh in one process, one tensor of each: proofs of rules, random plans, worlds of tests.
from torch.distributed._local_tensor import LocalIntNode, LocalTensor, LocalTensorMode, local_tensor_mode

# Values that depend on the rank's number in a world of one process: one for each rank.
from torch.distributed._local_tensor import maybe_run_for_local_tensor as each_rank

# The place of a shard in the files of a checkpoint, which ranks send to the first one.
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

# --- DTensor ---------------------------------------------------------------------------------------------------------
# DTensor's own check of a gradient scaler, which is right for gradients of one placement.
from torch.distributed.tensor._dispatch import found_inf_reduce_handler

# DTensor's sharding of operators: autopar places plain operands and sums of norms itself.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy
from torch.distributed.tensor._ops._math_ops import LINEAR_REDUCTION_OP_MAP
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
from torch.distributed.tensor._ops.utils import generate_redistribute_costs

# --- tracing ---------------------------------------------------------------------------------------------------------
# Graph modules are not compiled into Python code before somebody runs them.
from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules

# True inside torch.fx.symbolic_trace.
from torch.fx._symbolic_trace import is_fx_symbolic_tracing as fx_traces

# The proxy of a module's attribute in a trace, and the tracer that enters modules.
from torch.fx.experimental.proxy_tensor import _AttrProxy as AttributeProxy
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer as ModuleStackTracer

# Code of a graph that takes a list of its inputs and empties it, so that each one is freed after its last use.
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen

# Names of a graph's nodes, as fx gives them.
from torch.fx.graph import _Namespace as Namespace

# The Function that carries the backward hooks of modules, which cannot be traced.
from torch.nn.modules._functions import BackwardHookFunction

# The lookup of the modules of parameters by name, in tracing.
from torch.nn.utils._named_member_accessor import NamedMemberAccessor

# The active function modes: recomputation in a backward runs under those of the first forward.
from torch.overrides import _get_current_function_mode_stack as function_modes

# Nested arguments and results; its public twin, torch.utils.pytree, has no maps over types.
from torch.utils import _pytree as pytree

# Modes that see every operator: programs are counted and compared in them.
# True for a tensor subclass that consists of other tensors.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_in_torch_dispatch_mode,
    is_traceable_wrapper_subclass,
    return_and_correct_aliasing,
)

# All such modes are off inside: a user's function is run for real.
from torch.utils._python_dispatch import _disable_current_modes as no_dispatch_modes

# isort: on

TORCH: tuple[int, int] = tuple(map(int, torch.__version__.split(".")[:2]))  # type: ignore[assignment]
"""The version of torch that runs, as (major, minor)."""
OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 14)
"""Versions that were tested (``make test-versions``); on a newer one private names may be others, and repairs wrong."""

if TORCH > NEWEST_TORCH:
    warnings.warn(
        f"autopar was tested with torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} to {NEWEST_TORCH[0]}.{NEWEST_TORCH[1]}, "
        f"and this is {torch.__version__}: it uses private names of torch, which may mean something else there; "
        "compare a run with one device (autopar verify), or install a version that was tested",
        stacklevel=2,
    )

autograd_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
"""Calls back when a backward has ended."""

make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
"""A tensor with a shape and without storage of its own, around another: outputs that know their ranks."""

safe_softmax: Any = torch._safe_softmax
"""A softmax that gives zeros for a row without any key, as fused attention does."""


grouped_product: Any = torch._grouped_mm
"""The product of rows, group by group, under the name that models called it by before it had a public one."""


class FlexNames(NamedTuple):
    """Names that ``torch.nn.attention.flex_attention`` looks up in its module when it runs.

    Attributes:
        operator: the higher-order operator, called with checked arguments.
        refuses_devices: raises an error for devices without a kernel, on which nothing runs here.
        runs_uncompiled: True if the operator is called directly; else torch compiles a function around it.
        same_score: the default ``score_mod``.
        turned_blocks: transposes a block mask: from blocks of keys per query to blocks of queries per key.
    """

    operator: str = "flex_attention_hop"
    refuses_devices: str = "_validate_device"
    runs_uncompiled: str = "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    same_score: str = "_identity"
    turned_blocks: str = "_transpose_ordered"


FLEX_NAMES = FlexNames()
"""Flex attention runs as plain operators while these are exchanged."""


VARLEN_OPERATOR = ("torch_attn", "_varlen_attn")
"""Namespace and name of the operator that ``torch.nn.attention.varlen.varlen_attn`` calls, once that is imported."""


def compiled_functions_run_as_they_are() -> contextlib.AbstractContextManager[object]:
    """Make ``torch.compile(function)`` return the function itself during a trace."""
    config: Any = importlib.import_module("torch._dynamo.config")
    return mock.patch.object(config, "error_on_nested_fx_trace", False)


def scripted_functions_run_in_python() -> contextlib.AbstractContextManager[object]:
    """Make ``torch.jit.script`` and ``trace`` run the Python function in this scope.

    Compiled code hides from a trace which of its results require a gradient.
    """
    compiled: Any = torch.jit.ScriptFunction.__call__

    def call(function: Any, *args: object, **kwargs: object) -> object:
        return getattr(function, "_torchdynamo_inline", partial(compiled, function))(*args, **kwargs)

    return mock.patch.object(torch.jit.ScriptFunction, "__call__", call)


def plainly(operator: OpOverload) -> Callable[..., Any] | None:
    """Return torch's decomposition of an operator, such as ``tanh_backward`` in products; None without one."""
    written: Mapping[Any, Callable[..., Any]] = importlib.import_module("torch._decomp").decomposition_table
    return written.get(operator)


_keys_outside = threading.local()
"""By thread, the dispatch keys outside of :func:`operators_alone`, with autograd's among them."""


@contextlib.contextmanager
def operators_alone() -> Iterator[None]:
    """Enclose operators that run without autograd, and otherwise as if it were on: some give more results then."""
    before = getattr(_keys_outside, "keys", None)
    _keys_outside.keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    try:
        with torch.enable_grad(), below_autograd():
            yield
    finally:
        _keys_outside.keys = before


@contextlib.contextmanager
def autograd_again() -> Iterator[None]:
    """Enclose what autograd is to see inside of :func:`operators_alone`; nothing changes outside of it."""
    keys = getattr(_keys_outside, "keys", None)
    with contextlib.nullcontext() if keys is None else torch._C._ForceDispatchKeyGuard(*keys):
        yield


def direct_call(target: Any) -> Callable[..., Any]:
    """Return the shortest way from Python to an operator, without what ``OpOverload`` does for modes and subclasses."""
    return target._op if isinstance(target, OpOverload) else target  # type: ignore[no-any-return]


DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by an operator on tensors without values that gives a number or a shape that depends on values."""


data_of_tensors: Any = torch.Tensor.__dict__.get("data") or torch._C.TensorBase.__dict__["data"]
"""The descriptor of ``tensor.data``: assigning it to a DTensor goes on to its local tensor."""


@dataclass(frozen=True)
class Replaceable:
    """A private function of torch that can be replaced; its module is imported when needed.

    Attributes:
        module: its module.
        path: its name there, through attributes where it has dots.
    """

    module: str
    path: str

    def get(self) -> Any:
        """Return the current function."""
        owner, name = self._place()
        return getattr(owner, name)

    def set(self, value: Any) -> None:
        """Replace the function from now on."""
        owner, name = self._place()
        setattr(owner, name, value)

    def replaced(self, value: Any) -> contextlib.AbstractContextManager[object]:
        """Replace the function in this scope."""
        owner, name = self._place()
        return mock.patch.object(owner, name, value)

    def _place(self) -> tuple[Any, str]:
        *above, name = self.path.split(".")
        return reduce(getattr, above, importlib.import_module(self.module)), name


FAKE_PARAMETERS = Replaceable("torch.export._trace", "_fakify_params_buffers")
"""Function that makes the fake tensors of a module's parameters and buffers in a trace."""

EXPORT_INSIDE = (
    Replaceable("torch.fx.experimental.proxy_tensor", "track_tensor_tree"),
    FAKE_PARAMETERS,
    Replaceable("torch.export._trace", "_produce_aten_artifact"),
)
"""Functions of torch's tracing that run no code of the model: function modes are off in them."""

TRACEBACK_OF_NODES = Replaceable("torch.fx.proxy", "CapturedTraceback")
"""Stack of the lines that made a node of a trace: ``extract().summary()``."""

CHECK = Replaceable("torch", "_check_with")
"""Function that ``torch._check`` calls with its condition, a bool: unknown sizes are evaluated."""

EXPORT_BUFFER_HOOK = Replaceable("torch.export._trace", "register_buffer_assignment_hook")
"""Check that refuses a module's assignment of a buffer in a trace; capture follows such writes itself."""


def module_at(model: torch.nn.Module, path: str) -> torch.nn.Module:
    """Return the module under a name, also if a child is named like a method (``parameters``).

    ``get_submodule`` looks up an attribute, and finds the method.
    """
    for name in path.split(".") if path else ():
        child = model._modules[name]
        assert child is not None
        model = child
    return model


@contextlib.contextmanager
def modules_found_by_name() -> Iterator[None]:
    """Make torch's tracing look up modules by :func:`module_at`."""

    def get_submodule(accessor: Any, name: str) -> torch.nn.Module:
        if name not in accessor.memo:
            accessor.memo[name] = module_at(accessor.module, name)
        return accessor.memo[name]

    with mock.patch.object(NamedMemberAccessor, "get_submodule", get_submodule):
        yield


@contextlib.contextmanager
def some_rows(may_be_taken: Callable[[str], bool]) -> Iterator[None]:
    """Assume a data-dependent number of rows to be positive where Python asks: ``if rows.numel() == 0``.

    ``may_be_taken`` gets torch's name of the number (``u0``), as it appears in shapes of the traced program, and
    returns True if the requested branch may also be entered without rows. The question comes before the rows are used;
    a program on all rows and a mask (:mod:`autopar.capture.graph.selected_rows`) is right for none, too.
    """
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

    evaluate = ShapeEnv.evaluate_expr

    def evaluated(self: Any, expr: Any, *args: Any, **kwargs: Any) -> object:
        try:
            return evaluate(self, expr, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            symbols = list(getattr(expr, "free_symbols", ()))
            if len(symbols) != 1 or not getattr(expr, "is_Relational", False) or not str(symbols[0]).startswith("u"):
                raise
            none, many = (expr.subs(symbols[0], n) for n in (0, 2**20))
            if none == many or any(expr.subs(symbols[0], n) != many for n in (1, 2, 3)):
                raise  # it distinguishes more cases than none and some
            if not may_be_taken(str(symbols[0])):
                raise
            return many

    with mock.patch.object(ShapeEnv, "evaluate_expr", evaluated):
        yield


CHECKPOINT = Replaceable("torch.utils.checkpoint", "_checkpoint_without_reentrant_generator")
"""Function that runs a checkpointed region of a model: capture marks its ends."""

JVP_CALL = Replaceable("torch._functorch.eager_transforms", "_jvp_with_argnums")
"""Function that torch.func.jvp calls, where its transform is written out as operators."""

GRADIENT_NODE = Replaceable("torch.autograd.graph", "_get_grad_fn_or_grad_acc")
"""Function with which a hook finds the node of a tensor's gradient: refused, as a traced tensor has none."""

STATE_DICT_OPTIONS = Replaceable("torch.distributed.checkpoint.state_dict", "_verify_options")
"""Function that reads the options of torch's state dicts: optimizer states of our modules are always flat."""

TOTAL_NORM = Replaceable("torch.nn.utils.clip_grad", "_get_total_norm")
"""torch's norm of gradients, which would take the gradients of one stage for those of all."""

PLAIN_BESIDE_DTENSOR = Replaceable(
    "torch.distributed.tensor", "DTensor._op_dispatcher._try_replicate_spec_for_scalar_tensor"
)
"""Function with which DTensor places a plain tensor operand: torch allows numbers only."""

DTENSOR_RESULT = Replaceable("torch.distributed.tensor", "DTensor._op_dispatcher._dispatch_fast_path_python_tail")
"""Function that wraps local results of a DTensor operator: torch's own knows no plain tensor that is written to."""

DTENSOR_STRATEGY = Replaceable(
    "torch.distributed.tensor", "DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path"
)
"""Function that finds the sharding of an operator that is new to DTensor, or raises an error."""

DTENSOR_HANDLERS = Replaceable("torch.distributed.tensor", "DTensor._op_dispatcher._custom_op_handlers")
"""DTensor's custom handlers by operator: a dict."""

DTENSOR_STRATEGIES = Replaceable(
    "torch.distributed.tensor", "DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs"
)
"""DTensor's sharding rules by operator: a dict."""

DTENSOR_REDUCED_DIMS = Replaceable("torch.distributed.tensor._ops._math_ops", "_infer_reduction_dims")
"""Function that returns the dims of a DTensor's reduction: an empty list is no dim for torch's, all for operators."""

OPTIMIZERS_OF_ELEMENTS = tuple(
    Replaceable(f"torch.optim.{name}", name)
    for name in ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
)
"""The functional forms of optimizers that compute each element by itself; AdamW's is Adam's. ``params, grads`` and
lists of state come first, as lists of one length, or empty ones."""

OPTIMIZERS_OF_MATRICES = (
    Replaceable("torch.optim._muon", "muon"), Replaceable("torch.optim._adafactor", "adafactor"),
)  # fmt: skip
"""The functional forms of optimizers that look at more than an element of a parameter at once."""

MUON = OPTIMIZERS_OF_MATRICES[0]
"""Muon's: ``params, grads``, momenta, and options by keyword."""
ORTHOGONALIZE = Replaceable("torch.optim._muon", "_zeropower_via_newtonschulz")
"""What Muon does to a whole matrix: ``(matrix, coefficients, steps, eps)``; it computes in bfloat16 from the first."""
MUON_RATE = Replaceable("torch.optim._muon", "_adjust_lr")
"""Muon's rate for a matrix: ``(lr, adjust_lr_fn, shape)``."""

OPTIMIZER_STATES = tuple(
    Replaceable(f"torch.optim.{kind.lower()}", f"{kind}._init_group")
    for kind in ("Adadelta", "Adagrad", "AdamW", "Adam", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""What makes the state of a group of parameters, of these optimizers, and lists it for the functional form. AdamW's is
Adam's until Dynamo is used, which gives each class its own; it stands first, so that it is not replaced twice."""

TENSOR_LIST_CHECK = Replaceable("torch.distributed.distributed_c10d", "_check_tensor_list")
"""Function by which collectives handle lists of tensors: the dispatcher misses DTensors in lists of lists."""

AGENT_OF_TORCHRUN = Replaceable("torch.distributed.launcher.api", "LocalElasticAgent")
"""The class of torchrun's agent of one machine."""

OPEN_STORE = Replaceable("torch.distributed.rendezvous", "_create_c10d_store")
"""What opens the store through which ranks find each other: torchrun's own is used again after a restart, with all that
ended ranks have written."""

GROUP_NAME = Replaceable("torch.distributed.distributed_c10d", "_process_group_name")
"""How torch names a group that only its members make: by how many groups this rank is in. That may be another number on
each member, which then wait for each other for ever; or the name, and the addresses, of one that was ended."""


AOT_COMPILE = Replaceable("torch._dynamo.backends.common", "aot_module_simplified")
"""Function that compiler backends call with compilers for forward and backward, to see the graphs' collectives."""


def backend_named(options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the backend that options of ``torch.compile`` name as a callable, and the other options."""
    others = dict(options)
    backend = others.pop("backend", None) or "inductor"
    if backend == "inductor":
        settings = dict(others.pop("options", None) or {})
        apart = {name: settings.pop(name) for name in ("guard_filter_fn",) if name in settings}
        if apart:
            others["options"] = apart
        mode = others.pop("mode", None)
        inductor: Any = torch._TorchCompileInductorWrapper  # type: ignore[attr-defined]
        return inductor(mode if mode or settings else "default", settings, others.get("dynamic")), others
    if isinstance(backend, str):
        backend = importlib.import_module("torch._dynamo.backends.registry").lookup_backend(backend)
    return backend, others


def compilers_are_off() -> bool:
    """Check whether ``torch.compile`` leaves all functions as they are, as the environment says."""
    config: Any = importlib.import_module("torch._dynamo.config")
    return bool(config.disable) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


def takes_a_list(module: torch.fx.GraphModule) -> torch.nn.Module:
    """Wrap a graph so that what AOTAutograd makes of it takes a list of its inputs, and empties it."""
    return importlib.import_module("torch._dynamo.utils").GmWrapper(module, list)  # type: ignore[no-any-return]


def unwrapped(function: Any) -> Any:
    """Return what ``torch.compiler.disable`` and the like have wrapped; other functions as they are."""
    return importlib.import_module("torch._dynamo.eval_frame").innermost_fn(function)


def inductor_settings(settings: Mapping[str, object]) -> contextlib.AbstractContextManager[object]:
    """Change settings of inductor in this scope; those of a backend's own options count more."""
    return importlib.import_module("torch._inductor.config").patch(dict(settings))  # type: ignore[no-any-return]


def fake_store() -> dist.Store:
    """Return the store of a process group that sends nothing, for worlds of one process."""
    return importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()


def group_names() -> Mapping[str, dist.ProcessGroup]:
    """Return all process groups by their names in graphs."""
    names = dist.distributed_c10d._world.pg_names
    return {name: group for group, name in names.items()}


def has_other_groups(device_mesh: dist.DeviceMesh, along_axes: Sequence[dist.ProcessGroup]) -> None:
    """Give a mesh new process groups along its axes in place of destroyed ones."""
    device_mesh._dim_group_names = [group.group_name for group in along_axes]
    device_mesh._pg_registry.update({group.group_name: group for group in along_axes})


assert_async = torch._assert_async
"""Assertion on a tensor's value, which an accelerator checks asynchronously."""


def reached(node: Any) -> bool:
    """Return True if the running backward reaches a node of autograd; False for None."""
    if node is None:
        return False
    try:
        return bool(_will_run(node))
    except RuntimeError:  # its answer for a leaf whose gradient autograd.grad is to return
        return True


_attempt = ""
"""Name of this world's attempt."""


def uses_store_of_agent() -> bool:
    """Return True if the rendezvous store is torchrun's, which outlives the ranks."""
    return importlib.import_module("torch.distributed.rendezvous")._torchelastic_use_agent_store()  # type: ignore[no-any-return]


def name_attempt(name: str) -> None:
    """Set the prefix of the next world's attempt: :func:`default_store` has only its entries."""
    global _attempt
    _attempt = name


def default_store() -> dist.Store:
    """Return the part of the rendezvous store in which autopar reports failures, by a connection of its own.

    Torch's connection serves one request at a time, and a rank that makes a group waits in one for minutes, while
    nobody could tell it why. No request of autopar's blocks in the store: it first asks if the key exists.

    Raises:
        DistError: there is no world, or it is being ended while a thread asks.
    """
    try:
        of_torch = dist.distributed_c10d._get_default_store()
    except (ValueError, KeyError) as error:
        raise dist.DistError("the process group has been destroyed") from error
    own = _own_store  # of this world; another thread may be in another one
    return own[1] if own is not None and own[0] is of_torch else _connected(of_torch)


_own_store: tuple[Any, dist.Store] | None = None
"""A store of torch's, and autopar's part of it by a connection of its own."""


def _connected(of_torch: Any) -> dist.Store:
    global _own_store
    try:
        connected = of_torch.clone()
    except (RuntimeError, NotImplementedError):  # of one process, in which there is no connection
        connected = of_torch
    mine = dist.PrefixStore(f"autopar {_attempt}", connected)
    _own_store = of_torch, mine
    return mine


def caller_that_loads() -> Any:
    """Return the iterator of the ``DataLoader`` that draws rows now; None if something else draws them.

    Its ``_num_yielded`` counts the batches given to the loop, a positive ``_num_workers`` means that rows are drawn
    ahead, and ``_index_sampler`` has the batch size.
    """
    kind = importlib.import_module("torch.utils.data.dataloader")._BaseDataLoaderIter
    frame: Any = sys._getframe(2)
    for _ in range(4):
        if frame is None:
            return None
        if isinstance(drawn_for := frame.f_locals.get("self"), kind):
            return drawn_for
        frame = frame.f_back
    return None


def default_timeout_seconds() -> float:
    """Return the time-out of a collective of the default process group."""
    return dist.distributed_c10d._get_default_timeout(dist.get_backend()).total_seconds()


def timeout_of_world() -> datetime.timedelta:
    """Return the time-out of the default process group; groups made later get torch's own by default."""
    world: Any = dist.distributed_c10d._get_default_group()
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            return options._timeout  # type: ignore[no-any-return]
    return dist.distributed_c10d._get_default_timeout(dist.get_backend())  # type: ignore[no-any-return]


def options_of_compiler(compiler: Any) -> dict[str, Any]:
    """Return the ``torch.compile`` options (``backend``, ``dynamic``, ``fullgraph``) of a compiler.

    ``compiler`` is a result of :func:`callers_compiler`; ``backend`` includes mode and options.
    """
    fullgraph = False
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        fullgraph = fullgraph or getattr(compiler, "_one_graph", False)
        compiler = compiler._torchdynamo_orig_backend
    return {"backend": compiler, "dynamic": getattr(compiler, "dynamic", None), "fullgraph": fullgraph}


def count_as_compiled() -> None:
    """Tell an enclosing ``torch.compile(fullgraph=True)`` that something is compiled in its call, though no frame."""
    set_count = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)  # torch 2.13 counts
    if set_count is not None and (count := set_count(-1)) >= 0:
        set_count(count + 1)


all_gather_single: Any = getattr(functional_collectives, "all_gather_single", None) or (
    functional_collectives.all_gather_tensor
)
"""Gathers a tensor along its first dim, as a function; ``all_gather_tensor`` is its name up to torch 2.12."""


def _call_by_new_names() -> None:
    """Let spmd-types call two collectives by their new names in torch 2.13.

    The old names raise a ``FutureWarning`` per call in the user's terminal, about code that is not theirs. spmd-types
    gets a patched copy of torch's module; everyone else sees the original.
    """
    torchs = functional_collectives
    renamed = types.ModuleType(torchs.__name__)
    renamed.__dict__.update(vars(torchs))
    for old, new in (("all_gather_tensor", "all_gather_single"), ("reduce_scatter_tensor", "reduce_scatter_single")):
        setattr(renamed, old, getattr(torchs, new, getattr(torchs, old, None)))
    collectives_of_spmd_types.funcol = renamed


_call_by_new_names()

HAS_FUSED_RMS_NORM = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
"""True if RMS norm is one kernel on GPUs."""

__all__ = [
    "AGENT_OF_TORCHRUN",
    "AOT_COMPILE",
    "CHECK",
    "CHECKPOINT",
    "DATA_DEPENDENT",
    "DTENSOR_HANDLERS",
    "DTENSOR_REDUCED_DIMS",
    "DTENSOR_RESULT",
    "DTENSOR_STRATEGIES",
    "DTENSOR_STRATEGY",
    "EXPORT_BUFFER_HOOK",
    "EXPORT_INSIDE",
    "FAKE_PARAMETERS",
    "FLEX_NAMES",
    "GRADIENT_NODE",
    "GROUP_NAME",
    "HAS_FUSED_RMS_NORM",
    "LINEAR_REDUCTION_OP_MAP",
    "MUON",
    "MUON_RATE",
    "OPEN_STORE",
    "OPTIMIZERS_OF_ELEMENTS",
    "OPTIMIZERS_OF_MATRICES",
    "OPTIMIZER_STATES",
    "ORTHOGONALIZE",
    "PLAIN_BESIDE_DTENSOR",
    "STATE_DICT_OPTIONS",
    "TENSOR_LIST_CHECK",
    "TORCH",
    "TOTAL_NORM",
    "TRACEBACK_OF_NODES",
    "VARLEN_OPERATOR",
    "AttributeProxy",
    "BackwardHookFunction",
    "BoxedCodeGen",
    "DTensorSpec",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "LocalIntNode",
    "LocalTensor",
    "LocalTensorMode",
    "ModuleStackTracer",
    "Namespace",
    "NormPartial",
    "OpOverload",
    "OpOverloadPacket",
    "OpSchema",
    "OpStrategy",
    "Replaceable",
    "SingleLevelFunction",
    "StorageInfo",
    "TensorMeta",
    "TorchDispatchMode",
    "all_gather_single",
    "allow_plain_tensors",
    "arguments_of_to",
    "assert_async",
    "autograd_again",
    "autograd_engine",
    "backend_named",
    "below_autograd",
    "caller_that_loads",
    "callers_compiler",
    "compiled_functions_run_as_they_are",
    "compiler_traces",
    "compilers_are_off",
    "count_as_compiled",
    "current_backward",
    "data_of_tensors",
    "default_store",
    "default_timeout_seconds",
    "direct_call",
    "each_rank",
    "fake_store",
    "found_inf_reduce_handler",
    "function_modes",
    "functional_collectives",
    "functorch_apis",
    "functorch_is_active",
    "functorch_transforms",
    "fx_traces",
    "generate_redistribute_costs",
    "group_names",
    "group_of_axis",
    "grouped_product",
    "has_kernel",
    "has_other_groups",
    "inductor_settings",
    "is_in_torch_dispatch_mode",
    "is_traceable_wrapper_subclass",
    "is_transformed",
    "keeps_graph",
    "lazy_graph_modules",
    "local_tensor_mode",
    "make_wrapper_subclass",
    "module_at",
    "modules_found_by_name",
    "no_dispatch_modes",
    "operators_alone",
    "options_of_compiler",
    "places_in_masks",
    "plainly",
    "preserve_version_counter",
    "pytree",
    "reached",
    "return_and_correct_aliasing",
    "safe_softmax",
    "scripted_functions_run_in_python",
    "takes_a_list",
    "timeout_of_world",
    "top_saved_tensors_hooks",
    "unset_fake_temporarily",
    "unwrapped",
]  # fmt: skip
