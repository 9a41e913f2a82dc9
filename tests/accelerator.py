"""An accelerator that is not there: tensors on device ``emu:0`` whose values lie in this process's memory.

What runs on it under :class:`Accelerator` makes the numbers that the CPU makes, and every operator passes
:meth:`Accelerator.__torch_dispatch__`, which writes down what would make the host wait for a real accelerator (or would
not be on it at all): values read from the device, values copied to it, and tensors made on the CPU. Over several
processes it trains with a process group of ``cpu:gloo,emu:emuccl``, or of ``emuccl`` alone (:mod:`emulated_nccl`).
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from emulated_nccl import Collectives, register_backend
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "emu"
_READS = {
    f"aten::{name}" for name in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")
}
"""Operators whose result the host has to know before it can go on."""

class OnDevice(torch.Tensor):
    """A tensor on the accelerator; ``values`` has what it holds."""

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        wrapper: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), values.stride(), values.storage_offset(), dtype=values.dtype, layout=values.layout,
            device=torch.device(NAME, 0), requires_grad=False,
        )  # fmt: skip
        wrapper.values = values
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on the accelerator outside of its mode")

    def untyped_storage(self) -> torch.UntypedStorage:
        """Where the values lie: what resizes it frees memory."""
        return self.values.untyped_storage()

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.values!r})"


class _Event:
    """All that was begun has happened when the next step begins, and not before."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.times = enable_timing

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds until another one was recorded."""
        assert self.times and end.times
        return 1e3 * (end.at - self.at)

    def record(self, stream: Any = None) -> None:
        assert stream in (None, _THE_STREAM)
        self.at = time.perf_counter()
        self.step = Accelerator.current.step if Accelerator.current is not None else -1

    def synchronize(self) -> None:
        if Accelerator.current is not None and Accelerator.current.step == self.step:
            Accelerator.current.saw("an event of this step is waited for")

    def query(self) -> bool:
        """Devices are not equally fast: that of every other rank has done all that was begun, the others nothing."""
        return dist.is_initialized() and dist.get_rank() % 2 == 0


class _Stream:
    """The only one there is: what is put on it has happened at once."""

    def __init__(self, _: Any = None) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def wait_event(self, _: Any) -> None:
        pass

    def record_event(self) -> _Event:
        event = _Event()
        event.record()
        return event

    def synchronize(self) -> None:
        pass


_THE_STREAM = _Stream()


class _Module(_DummyBackendModule):
    Event = _Event
    Stream = _Stream

    def current_stream(self, _: Any = None) -> _Stream:
        return _THE_STREAM

    def stream(self, _: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def device_count(self) -> int:
        return 1

    def set_device(self, _: Any) -> None:
        pass

    def synchronize(self, *_: Any) -> None:
        pass

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, *_: Any) -> None:
        pass


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _from_here() -> str:
    """The lines of autopar, or of the test, that led here, the innermost first."""
    frames = [f for f in traceback.extract_stack() if "/autopar/" in f.filename and "/tests/" not in f.filename]
    return " < ".join(f"{Path(f.filename).stem}.{f.name}:{f.lineno}" for f in frames[:-5:-1])


def _in_message() -> bool:
    """Whether hosts exchange a message, or gloo puts together what has arrived."""
    stack = traceback.extract_stack()
    ours = [f for f in stack if "/autopar/" in f.filename and "/tests/" not in f.filename]
    return any(f.name == "all_gather_object" for f in stack) or (bool(ours) and "work.wait()" in (ours[-1].line or ""))


def _is_device(x: Any) -> bool:
    return isinstance(x, torch.device) and x.type == NAME


class _Tensor(TorchFunctionMode):
    """``torch.tensor(..., device="emu")``, which torch makes without asking any mode, and ``resize_`` of tensors on the
    accelerator (collectives of objects do that), for which a wrapper has to become one of another size."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_ours(kwargs.get("device")):
            self.accelerator.saw(f"{func.__name__} copies to the device")
            kwargs["device"] = "cpu"
            with torch._C.DisableTorchFunction():
                return OnDevice(func(*args, **kwargs))
        if func is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            self.accelerator.saw("tolist reads from the device")
            return args[0].values.tolist()
        if func is torch.Tensor.resize_ and isinstance(args[0], OnDevice):
            with torch._C.DisableTorchFunction():
                resized = OnDevice(args[0].values.resize_(*args[1:], **kwargs))
                args[0].data = resized
            args[0].values = resized.values
            return args[0]
        return func(*args, **kwargs)


class Accelerator(TorchDispatchMode):
    """Tensors may be on the accelerator.

    Attributes:
        seen: what would have made the host wait, or was on the CPU: what it was, and where.
        collectives: those of this process on the accelerator.
    """

    current: ClassVar[Accelerator | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.watches, self.step = False, 0
        self.collectives = Collectives(torch.device(NAME, 0), lambda x: isinstance(x, OnDevice), _from_here)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[str]]:
        """Write down what happens in here."""
        self.seen, self.watches, self.step = [], True, self.step + 1
        try:
            yield self.seen
        finally:
            self.watches = False

    def saw(self, what: str) -> None:
        """Write it down, unless it belongs to a message between hosts, which has nothing to do with the device."""
        if self.watches and not (what.endswith("on the CPU") and _in_message()):
            self.seen.append(f"{what}: {_from_here()}")

    def __enter__(self) -> Accelerator:
        self.function_mode = _Tensor(self)
        self.function_mode.__enter__()
        Accelerator.current = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Accelerator.current = None
        self.function_mode.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.Tensor.__torch_dispatch__
        if any(not issubclass(t, OnDevice) and t.__torch_dispatch__ is not plain for t in types):
            return NotImplemented  # a DTensor, say: its own operators come here again
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            done = self.collectives.call(func, args, kwargs, OnDevice)
            if done is not NotImplemented:
                return done
        flat, tree = pytree.tree_flatten((args, kwargs))
        ours = [x for x in flat if isinstance(x, OnDevice)]
        inner = [x.values if isinstance(x, OnDevice) else torch.device("cpu") if _is_device(x) else x for x in flat]
        a, k = pytree.tree_unflatten(inner, tree)
        asked = kwargs.get("device")
        there = _is_ours(asked) if asked is not None else bool(ours)
        if func._schema.name == "aten::copy_":
            there = isinstance(args[0], OnDevice)
        out = func(*a, **k)
        name = func._schema.name
        if func.namespace == "c10d":
            by_values = {id(x.values): x for x in ours}
            return pytree.tree_map_only(torch.Tensor, lambda x: by_values.get(id(x), x), out)
        if (ours and not there) or (there and name in _READS):
            if not (name == "aten::copy_" and args[2:3] == (True,)):  # one that the host does not wait for
                self.saw(f"{name} reads from the device")
        elif there and any(type(x) is torch.Tensor and x.device.type == "cpu" for x in flat):
            self.saw(f"{name} takes a tensor on the CPU")
        elif name == "aten::_local_scalar_dense":
            self.saw(f"{name} reads a tensor on the CPU")
        elif name in ("aten::empty", "aten::copy_") and not there:
            pass  # memory, and what arrives there without being waited for
        elif not there and any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in pytree.tree_leaves(out)):
            self.saw(f"{name} makes a tensor on the CPU")
        if not there:
            return out
        wrapped = pytree.tree_map_only(torch.Tensor, OnDevice, out)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def register() -> None:
    """Make the name of the accelerator known to torch, once in a process."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, _Module())
        register_backend(NAME)
