"""accelerate's view of the processes: one, whatever torchrun has started.

accelerate would wrap models in DistributedDataParallel and give each rank other batches. A parallel module is called
with the whole batch on every rank, as on one device, so its state describes one process. The rank's number is kept: the
first writes files and logs.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from accelerate.state import AcceleratorState, PartialState

from autopar.errors import AutoparError

_SAID_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELERATE_USE_FSDP",
                      "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")  # fmt: skip
_OTHER_SYSTEMS = tuple(name for name in _SAID_BY_LAUNCHERS if name.startswith("ACCELERATE_"))


@contextlib.contextmanager
def without_launcher() -> Iterator[None]:
    """Hide torchrun's environment variables about the ranks in this scope."""
    before = {name: os.environ.pop(name) for name in _SAID_BY_LAUNCHERS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def world_size() -> int:
    """Return the number of processes that torchrun has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def as_one_process(*, cpu: bool = False) -> PartialState:
    """Return accelerate's state of one process, made anew if it was of several; ``cpu`` ignores accelerators."""
    for name in _OTHER_SYSTEMS:
        if os.environ.get(name, "false").lower() in ("1", "true"):
            raise AutoparError(
                f"{name} is set: accelerate's launcher asks for another way to parallelize; start the script with "
                "torchrun, or with an accelerate config of plain multi-process training"
            )
    if PartialState._shared_state and PartialState().num_processes > 1:
        AcceleratorState._reset_state(reset_partial_state=True)
    with without_launcher():
        state = PartialState(cpu=cpu)
    tell_ranks(state)
    return state


def tell_ranks(state: PartialState) -> None:
    """Set the number and the device of this rank in a state of one process."""
    state.process_index = int(os.environ.get("RANK", "0"))
    state.local_process_index = int(os.environ.get("LOCAL_RANK", "0"))
    if state.device.type not in ("cpu", "mps"):
        state.device = torch.device(state.device.type, state.local_process_index)
        torch.accelerator.set_device_index(state.local_process_index)
