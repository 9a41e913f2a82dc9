"""Megatron-Core's own parser and checks, on a processor: the properties of a GPU are stubbed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import torch

warnings.filterwarnings("ignore")
KINDS = {"0": "flag", "None": "one", "+": "many", "*": "many", "3": "many"}


def _stub_gpu() -> None:
    """Answer what Megatron asks of a GPU as an H100 does; no kernel is run."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="H100")
    torch.cuda.is_available = lambda: False


_stub_gpu()

import megatron.core.utils as core_utils  # noqa: E402
import megatron.training.arguments as arguments  # noqa: E402
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator  # noqa: E402
from packaging.version import Version  # noqa: E402


def _stub_transformer_engine() -> None:
    """State a version of Transformer Engine, which needs a GPU to be installed; only its number is asked for."""

    def at_least(version: str, check_equality: bool = True) -> bool:
        return Version("2.14.0") >= Version(version)

    for name in list(sys.modules):
        if name.startswith("megatron.") and hasattr(sys.modules[name], "is_te_min_version"):
            sys.modules[name].is_te_min_version = at_least
    core_utils.get_te_version = lambda: Version("2.14.0")


_stub_transformer_engine()


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``pretrain_gpt.py``."""
    return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


def fields() -> dict[str, str]:
    """Return every option as ``kind/group/dest``: a flag, with one value, or with many."""
    found = {}
    for group in parser()._action_groups:
        for action in group._group_actions:
            for name in action.option_strings:
                if name.startswith("--") and name != "--help":
                    found[name] = f"{KINDS[str(action.nargs)]}/{group.title}/{action.dest}"
    return dict(sorted(found.items()))


@contextlib.contextmanager
def _environment(**values: str | None) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            _set(name, value)
        yield
    finally:
        for name, value in before.items():
            _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def checked(words: list[str], world: int, connections: str | None = "1") -> argparse.Namespace:
    """Return a command line as Megatron understands it, checked by all that it checks before a model is built.

    ``connections``: CUDA_DEVICE_MAX_CONNECTIONS of the ranks; None where it is not set.

    Raises:
        Exception: whatever Megatron raises; ``SystemExit`` of its parser becomes a ValueError.
    """
    said = io.StringIO()
    before = sys.argv
    # the fused kernel for rotary embeddings is looked for in Transformer Engine, which is not installed
    sys.argv = ["pretrain_gpt.py", *words, "--no-rope-fusion"]
    try:
        with (
            _environment(WORLD_SIZE=str(world), RANK="0", CUDA_DEVICE_MAX_CONNECTIONS=connections),
            contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            args = arguments.validate_args(arguments.parse_args()) or None
            _check_more(args, world)
    except SystemExit as error:
        raise ValueError(said.getvalue().strip().splitlines()[-1]) from error
    finally:
        sys.argv = before
    return args


def _check_more(args: argparse.Namespace, world: int) -> None:
    """Check what is checked behind ``validate_args``: the config, groups of ranks, microbatches, the schedule, cuts."""
    args.vocab_size = args.vocab_size or 128
    config = arguments.core_transformer_config_from_args(args)
    experts = config.expert_tensor_parallel_size * config.expert_model_parallel_size
    if world % (experts * config.pipeline_model_parallel_size):  # parallel_state.initialize_model_parallel
        raise RuntimeError(f"world_size ({world}) is not divisible by {experts * config.pipeline_model_parallel_size}")
    counted = ConstantNumMicroBatchesCalculator(
        args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False, 0
    )
    _check_schedule(args, config, counted.get())
    tp = config.tensor_model_parallel_size
    for name, size, ranks in (
        ("ffn_hidden_size", config.ffn_hidden_size, tp),
        ("moe_ffn_hidden_size", config.moe_ffn_hidden_size or 0, config.expert_tensor_parallel_size),
        ("seq_length", args.seq_length if config.sequence_parallel else 0, tp * config.context_parallel_size),
    ):  # core/utils.py: divide(), at the building of the layers
        if size % ranks:
            raise AssertionError(f"{name} {size} is not divisible by {ranks}")
    if config.num_moe_experts and tp > 1 and not config.sequence_parallel:  # MoELayer.forward
        raise ValueError("MoE and tensor parallelism are enabled without also enabling sequence parallelism")


def _check_schedule(args: argparse.Namespace, config: object, microbatches: int) -> None:
    """Check as forward_backward_pipelining_with_interleaving does, and the even division of layers."""
    vp, pp = args.virtual_pipeline_model_parallel_size, args.pipeline_model_parallel_size
    if vp is None:
        return
    group = config.microbatch_group_size_per_vp_stage  # type: ignore[attr-defined]
    if group > microbatches or group < pp:
        raise ValueError(f"the group of {group} microbatches is not in range [{pp}, {microbatches}]")
    if 0 < microbatches % group < pp:
        raise RuntimeError(f"the last group has {microbatches % group} microbatches, pp is {pp}")
    if args.pipeline_model_parallel_layout is None and args.num_layers // pp % vp:
        raise AssertionError(f"{args.num_layers // pp} layers of a rank are not divisible by vp={vp}")
