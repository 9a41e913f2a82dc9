"""A communication backend for the accelerator that is not there (:mod:`accelerator`), with NCCL's rules of memory.

Two things that NCCL does and gloo does not, and a program for gloo gets wrong without noticing:

* It takes tensors on the accelerator alone. Where a world or a group has this backend and no other, a tensor on the CPU
  is refused. So is one of numbers that it does not send (:data:`NOT_SENT`), or one with gaps between its elements.
* A collective has happened when it is waited for, and not before. Here that is the latest moment that is possible: the
  values of a collective travel in copies, its output holds NaN (integers: the smallest ones) until ``wait``, and what
  was given to it must be as it was until then. So a result that is read too early, or never waited for, shows in the
  numbers; an input that is written to too early, and memory that is given back too early, is a :class:`TooEarly`.

What is read and written is compared when it is waited for, so the error has the place where the collective began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

BACKEND = "emuccl"
NOT_SENT = frozenset(
    {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128}
)
"""What NCCL has no name for."""
_below: dict[int, tuple[Any, Any, str]] = {}
"""By ``id`` of a backend: itself, the group of gloo by which values really travel, and that group's name."""


class TooEarly(AssertionError):
    """Something was done to a collective's tensors before it had happened."""


class RefusedTensor(AssertionError):
    """A tensor on the CPU, or of numbers that are not sent, was given to a group of the accelerator."""


def register_backend(device: str) -> None:
    """Make the backend known to torch, for tensors on that type of device, once in a process."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _made, devices=[device])


def _made(store: Any, rank: int, size: int, timeout: Any) -> Any:
    backend = dist.ProcessGroupGloo(dist.PrefixStore("values", store), rank, size, timeout)
    below = dist.ProcessGroup(dist.PrefixStore("below", store), rank, size)
    below._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    below._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    name = f"below {len(_below)}"
    below._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, below)
    _below[id(backend)] = backend, below, name
    return backend


def _below_of(group: Any, device: torch.device) -> Any:
    """The group of gloo under a group of this backend, and its name; None of another backend."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:
        return None
    return _below[id(backend)][1:] if id(backend) in _below else None


def _in_one_piece(x: torch.Tensor) -> bool:
    """Whether its elements lie one after the other, in the order of its dims or with channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]))


def _bits(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x.new_empty(0, dtype=torch.uint8)
    # a dim of one element is contiguous by any stride, which a view of another dtype does not take
    return x.detach().contiguous().as_strided([x.numel()], [1]).view(torch.uint8)


def _poison(x: torch.Tensor) -> None:
    if x.is_floating_point() or x.is_complex():
        x.fill_(float("nan"))
    elif x.dtype is torch.bool:
        x.fill_(True)  # not as it comes: a byte of memory that was never written may be neither True nor False
    else:
        x.fill_(torch.iinfo(x.dtype).min)


class _Tensors:
    """What a collective reads and writes until it has happened.

    Args:
        inputs, outputs: their values, in this process's memory.
        where: where the collective began.
    """

    def __init__(self, name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], where: str) -> None:
        self.name, self.where = name, where
        self.inputs = [(x, x.clone()) for x in inputs if not any(x is y for y in outputs)]
        self.copies = {id(x): x.clone() for x in [*inputs, *outputs]}
        self.outputs = list(outputs)
        for x in outputs:
            _poison(x)
        self.empty = [x.clone() for x in outputs]
        self.bytes = [x.untyped_storage().nbytes() for x in [*inputs, *outputs]]
        self.all = [*inputs, *outputs]

    def finish(self) -> None:
        """It has happened: the outputs have their values."""
        for x, n_bytes in zip(self.all, self.bytes, strict=True):
            if x.untyped_storage().nbytes() != n_bytes:
                raise TooEarly(f"{self.name} from {self.where}: its memory was given back before it was waited for")
        for x, before in self.inputs:
            if not torch.equal(_bits(x), _bits(before)):
                raise TooEarly(f"{self.name} from {self.where}: its input was written to before it was waited for")
        for x, before in zip(self.outputs, self.empty, strict=True):
            if not torch.equal(_bits(x), _bits(before)):
                raise TooEarly(f"{self.name} from {self.where}: its output was written to before it was waited for")
            x.copy_(self.copies[id(x)])


class _LateWork(Work):
    """Of a collective that happens when it is waited for."""

    def __init__(self, collectives: Collectives, work: Any, tensors: _Tensors) -> None:
        super().__init__()
        self.collectives, self.work, self.tensors, self.done = collectives, work, tensors, False

    def wait(self, timeout: Any = None) -> bool:
        if not self.done:
            with _disable_current_modes(), torch.no_grad():
                self.work.wait()
                self.done = True
                self.collectives.under_way.remove(self)
                self.tensors.finish()
        return True

    def is_completed(self) -> bool:
        return self.done


class Collectives:
    """Those of one process on the accelerator.

    Attributes:
        under_way: those that nobody has waited for.
        count: how many there have been, by name.
    """

    def __init__(self, device: torch.device, is_ours: Callable[[Any], bool], where: Callable[[], str]) -> None:
        self.device, self.is_ours, self.where = device, is_ours, where
        self.under_way: list[Any] = []
        self.count: dict[str, int] = {}
        self.functional: dict[int, tuple[Any, torch.Tensor, _Tensors]] = {}

    def call(self, func: Any, args: Any, kwargs: Any, wrapped: Callable[[torch.Tensor], Any]) -> Any:
        """A collective of torch's (``c10d``, or functional); NotImplemented where it is none of this backend's.

        Args:
            wrapped: puts a value on the accelerator.
        """
        name = func._schema.name
        if name in ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"):
            return self._wait_tensor(args[0])  # what the second gives waits as soon as anything is done with it
        place, group = self._group(args)
        if group is None:
            return NotImplemented
        below = _below_of(group, self.device)
        if below is None:
            return NotImplemented
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        ours = [x for x in tensors if self.is_ours(x)]
        if not ours and torch.device("cpu") in group._device_types:
            return NotImplemented
        if len(ours) < len(tensors) and not name.endswith("::barrier"):
            raise RefusedTensor(f"{name} on a group of the accelerator takes a tensor on the CPU: {self.where()}")
        functional = func.namespace == "_c10d_functional"
        # Functional collectives make pairs of complex numbers themselves, below what is seen here.
        if odd := [x.dtype for x in tensors if x.dtype in NOT_SENT and not (functional and x.is_complex())]:
            raise RefusedTensor(f"{name} takes a tensor of {odd[0]}, which NCCL does not send: {self.where()}")
        if any(not _in_one_piece(x) for x in tensors):
            raise RefusedTensor(f"{name} takes a tensor that is not contiguous, which NCCL refuses: {self.where()}")
        self.count[name] = self.count.get(name, 0) + 1
        args = [*args]
        args[place] = below[1] if functional else below[0].boxed()
        inputs, outputs = _roles(func, args, functional)
        values = _Tensors(name, [x.values for x in inputs], [x.values for x in outputs], self.where())

        def inner(x: Any) -> Any:
            return values.copies[id(x.values)] if self.is_ours(x) else x

        a, k = pytree.tree_map(inner, (args, kwargs))
        result = func(*a, **k)
        if functional:
            return pytree.tree_map_only(torch.Tensor, lambda x: self._coming(x, values, wrapped), result)
        *rest, work = result if isinstance(result, tuple | list) else [result]
        late = _LateWork(self, Work.unbox(work) if isinstance(work, torch.ScriptObject) else work, values)
        self.under_way.append(late)
        by_copy = {id(copy): x for x in ours for copy in [values.copies[id(x.values)]]}
        rest = pytree.tree_map_only(torch.Tensor, lambda x: by_copy.get(id(x), x), rest)
        boxed = late.boxed()
        return (*rest, boxed) if isinstance(result, tuple | list) else boxed

    def _group(self, args: Sequence[Any]) -> tuple[int, Any]:
        for i, x in enumerate(args):
            if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()):
                return i, dist.ProcessGroup.unbox(x)
            if isinstance(x, dist.ProcessGroup):
                return i, x
        if args and isinstance(args[-1], str):
            return len(args) - 1, torch._C._distributed_c10d._resolve_process_group(args[-1])
        return -1, None

    def _coming(self, value: torch.Tensor, tensors: _Tensors, wrapped: Callable[[torch.Tensor], Any]) -> Any:
        """What a functional collective gives before it is waited for."""
        out = torch.empty_like(value)
        _poison(out)
        self.functional[out.untyped_storage().data_ptr()] = out, value, tensors
        return wrapped(out)

    def _wait_tensor(self, x: Any) -> Any:
        if not self.is_ours(x):
            return NotImplemented
        out, value, tensors = self.functional.pop(x.values.untyped_storage().data_ptr(), (None, None, None))
        if out is not None:
            with _disable_current_modes(), torch.no_grad():
                out.copy_(torch.ops._c10d_functional.wait_tensor(value))
                tensors.finish()
        return x

    @property
    def forgotten(self) -> list[str]:
        """Those that nobody has waited for, with the places where they began."""
        works = [work.tensors for work in self.under_way]
        return [f"{t.name} from {t.where}" for t in (*works, *(t for _, _, t in self.functional.values()))]


def _roles(func: Any, args: Sequence[Any], functional: bool) -> tuple[list[Any], list[Any]]:
    """The tensors that a collective reads, and those that it writes; what it does both to is in both."""
    inputs: list[Any] = []
    outputs: list[Any] = []
    for argument, value in zip(func._schema.arguments, args, strict=False):
        tensors = [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]
        reads = functional or (not argument.name.startswith("output") and func._schema.name != "c10d::recv_")
        writes = not functional and not argument.name.startswith("input") and func._schema.name != "c10d::send"
        inputs += tensors if reads else []
        outputs += tensors if writes else []
    return inputs, outputs
