"""Run a script with accelerate on gloo ranks, where it has FSDP for accelerators alone: a processor passes for one."""

import runpy
import sys

import accelerate.state
import torch
from accelerate.utils import DistributedType


def prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
    return "gloo", DistributedType.MULTI_GPU


def set_device(self):
    self.device = torch.device("cpu")


accelerate.state.PartialState._prepare_backend = prepare_backend
accelerate.state.PartialState.set_device = set_device
DDP = torch.nn.parallel.DistributedDataParallel


class OnProcessors(DDP):
    """DistributedDataParallel without the index of a GPU."""

    def __init__(self, module, device_ids=None, output_device=None, **kwargs):
        super().__init__(module, **kwargs)


torch.nn.parallel.DistributedDataParallel = OnProcessors
if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
