"""Two ways to a joint graph: the whole program traced, or each distinct call once; CPU seconds and nodes.

``python benchmarks/step_program/tracing.py 2 8``: Llama with so many layers, on a mesh of one device.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.fx.experimental.proxy_tensor import make_fx

sys.path.insert(0, str(Path(__file__).resolve().parent))
from building import Builder
from generating import Functions
from models import of_zoo

from autopar.capture import capture
from autopar.lower.emit import lower
from autopar.planner.intra_op.one_device import one_device
from autopar.torch_private import FakeTensorMode


def _loss_and_gradients(
    module: torch.nn.Module, loss_at: int, wants: list[int], given: list[torch.Tensor]
) -> list[torch.Tensor]:
    values = [x.detach().requires_grad_(k in wants) for k, x in enumerate(given)]
    with torch.enable_grad():
        loss = module(*values)[loss_at]
    return [loss.detach(), *torch.autograd.grad(loss, [values[k] for k in wants])]


def main() -> None:
    """Trace Llamas of the given numbers of layers in both ways."""
    for layers in map(int, sys.argv[1:]):
        model, args, kwargs = of_zoo("llama", layers=layers)()
        graph = capture(model, args, kwargs).graph
        program = lower(graph, one_device(graph))
        wants = [k for k, slot in enumerate(program.slots) if slot.needs_grad]
        began = time.thread_time()
        step = Builder(program, [graph.loss], wants).build()
        built = time.thread_time() - began
        functions = Functions(step)
        generated = time.thread_time() - began - built
        with FakeTensorMode(allow_non_fake_inputs=True):
            values = [torch.empty(x.meta["val"].shape, dtype=x.meta["val"].dtype) for x in step.placeholders]

            began = time.thread_time()
            whole = make_fx(partial(_loss_and_gradients, program.module, graph.loss, wants))(values)
            traced = time.thread_time() - began
        n = sum(node.op == "call_function" for node in whole.graph.nodes)
        print(
            f"llama of {layers} layers, {len(step.calls)} calls, {step.distinct} distinct: by call {built:.2f} s and "
            f"{generated:.2f} s for {functions.n_forward + functions.n_backward} nodes; whole {traced:.2f} s for {n}",
            flush=True,
        )


if __name__ == "__main__":
    main()
