"""Training script in plain torch, with parallelism from ``parallelize.py``.

On one device::

    python train.py --steps 4

On many, with the world size that ``MESH`` in parallelize.py multiplies up to::

    torchrun --nproc-per-node 8 train.py --steps 1000

The losses are the same, to rounding. Fill in :func:`batches`; everything else is ready.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parallelize
import torch
import torch.distributed as dist

# --- model ---
MODEL: dict[str, Any] = {"file": "model.py", "factory": "make"}
EXAMPLE: dict[str, Any] = {}
OPTIMIZER: dict[str, Any] = {"name": "adamw", "lr": 1e-3}
# --- code ---

HERE = Path(__file__).resolve().parent


def batches(example: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the batch of every step, the same on all ranks: the inputs of the model by name.

    Fill in your data here. Until then the example batch is repeated: random tokens or pixels for a model from a
    config, and for a model of your own the inputs that its function returns.
    """
    while True:
        yield example


def build() -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return the model with its initial weights, on the processor, and its example batch: inputs by name."""
    if "config" in MODEL:
        return of_config(), {name: random_input(**spec) for name, spec in EXAMPLE.items()}
    spec = importlib.util.spec_from_file_location("user_model", HERE / MODEL["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["user_model"] = module
    sys.path.insert(0, str(HERE))
    spec.loader.exec_module(module)
    model, *inputs = getattr(module, MODEL["factory"])()
    if len(inputs) == 1 and isinstance(inputs[0], tuple) and list(map(type, inputs[0])) == [tuple, dict]:
        inputs = list(inputs[0])
    args = next((part for part in inputs if not isinstance(part, dict)), ())
    kwargs = next((part for part in inputs if isinstance(part, dict)), {})
    args = (args,) if isinstance(args, torch.Tensor) else args
    return model.train(), {**{f"arg_{k}": value for k, value in enumerate(args)}, **kwargs}


def of_config() -> torch.nn.Module:
    """Return the transformers model of ``config.json`` with random weights."""
    import transformers

    values = json.loads((HERE / MODEL["config"]).read_text(encoding="utf-8"))
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    config.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    model = getattr(transformers, MODEL["architecture"])._from_config(config, dtype=getattr(torch, MODEL["dtype"]))
    return model.train()


def random_input(shape: list[int], dtype: str, high: int = 0) -> torch.Tensor:
    """Return random numbers, or random integers below ``high``; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    if high:
        return torch.randint(0, high, shape, generator=generator)
    return torch.randn(shape, generator=generator, dtype=getattr(torch, dtype))


def call(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the loss of the model for inputs by name; those of ``arg_0``, ``arg_1`` are positional."""
    args = [inputs[name] for name in inputs if name.startswith("arg_")]
    output = model(*args, **{name: value for name, value in inputs.items() if not name.startswith("arg_")})
    loss = getattr(output, "loss", output)
    return loss if isinstance(loss, torch.Tensor) else leaves(output)[MODEL["loss"]]


def leaves(output: Any) -> list[Any]:
    """Return what is in nested tuples, lists and dicts, in order."""
    if isinstance(output, (tuple, list, dict)):
        values = output.values() if isinstance(output, dict) else output
        return [leaf for value in values for leaf in leaves(value)]
    return [output]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; parameters on different meshes are in groups of their own, as its kernels want them."""
    groups: dict[Any, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    options = {name: value for name, value in OPTIMIZER.items() if name != "name"}
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    return kinds[OPTIMIZER["name"]]([{"params": group} for group in groups.values()], **options)


def check_same(model: torch.nn.Module, example: dict[str, Any]) -> None:
    """Refuse weights or inputs that processes have drawn differently: each takes its part of them.

    Raises:
        SystemExit: it says which differ first.
    """
    tensors = {**example, **dict(model.named_parameters()), **dict(model.named_buffers())}
    sums = {name: t.double().sum().item() for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {name: repr(value) for name, value in sums.items()})
    for rank, other in enumerate(every):
        name = next((name for name in every[0] if other.get(name) != every[0][name]), None)
        if name is not None:
            raise SystemExit(
                f"'{name}' adds up to {every[0][name]} on rank 0 and to {other.get(name)} on rank {rank}: the function "
                "that makes the model draws other numbers in every process; call torch.manual_seed(0) in it, first"
            )


def arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description="Train in plain torch.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="", help="train all in this format, without mixed precision: float64")
    parser.add_argument("--losses", default="", help="write the losses to this JSON file")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Train, and print the loss of every step."""
    args = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group({"cuda": "nccl"}.get(args.device, "gloo"))
    torch.manual_seed(args.seed)  # the same weights in every process
    model, example = build()
    stored = args.dtype or parallelize.PRECISION.get("parameters")
    if stored:
        model.to(getattr(torch, stored))
    if args.dtype:
        dtype = getattr(torch, args.dtype)
        example = {k: v.to(dtype) if torch.is_floating_point(v) else v for k, v in example.items()}
    if world > 1:
        check_same(model, example)
    trainer = parallelize.ParallelTraining(model, call, example, device, mixed=not args.dtype)
    torch.manual_seed(args.seed + 1 + trainer.draws)  # data ranks and stages draw masks of dropout of their own
    optimizer = optimizer_of(trainer.model)
    losses = []
    for step, batch in zip(range(args.steps), batches(example), strict=False):
        loss = trainer.forward_backward(batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if trainer.rank == 0:
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)
    if args.losses and trainer.rank == 0:
        Path(args.losses).write_text(json.dumps(losses), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
