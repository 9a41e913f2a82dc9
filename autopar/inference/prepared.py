"""Steps of ``parallelize(mode="inference")`` beside spreading a model: caches become buffers, and it generates.

>>> model = autopar.parallelize(hf_model, 2, input_ids, mode="inference")          # input_ids: [rows, prompt]
>>> tokens = model.generate(input_ids, attention_mask=mask, max_new_tokens=64)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from autopar.errors import CaptureError, RunError, first_few
from autopar.inference.plain_models import PassedCaches, TokenLoop, changed_buffers, given_generate
from autopar.parallelizing.arguments import check
from autopar.parallelizing.call_examples import split_inputs
from autopar.torch_private import pytree

ROOM = 256
"""Tokens behind the example's prompt for which a cache has room, where nothing is said."""


PINS = "constraints", "params"
"""Options whose keys are patterns of names."""


@dataclass(frozen=True)
class Prepared:
    """A model that is ready to be spread.

    Attributes:
        module: what is spread.
        args, kwargs: its call of one token.
        finished: turns what ``parallelize`` made of the module, and of the encoder if there is one, into what the user
            gets.
        encoder: an encoder, which is spread by a plan of its own, with its call.
    """

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    finished: Callable[[Any, Any], Any]
    encoder: tuple[Any, Mapping[str, Any]] | None = None

    def options_of(self, module: torch.nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of ``parallelize`` for one of two modules: pins of names that are in the other are out."""
        init = options.get("init")
        options = {**options, "init": None if init is None else lambda one: _initialized(one, init)}
        if self.encoder is None:
            return options
        both = [self.module, self.encoder[0]]
        other = both[1] if module is both[0] else both[0]

        def mine(pattern: str) -> bool:
            return _has(module, pattern) or not _has(other, pattern)

        return {
            name: {key: way for key, way in given.items() if mine(key)} if name in PINS and given else given
            for name, given in options.items()
        }  # fmt: skip


def _initialized(module: Any, init: Callable[[torch.nn.Module], Any]) -> None:
    """Set what a module owns: by the user's function, or empty caches, which are none of the user's."""
    if hasattr(module, "cache_names") or isinstance(module, PassedCaches):
        module.reset_parameters()
    else:
        init(module)


def _has(module: torch.nn.Module, pattern: str) -> bool:
    """Check whether a pattern of operators or parameters has the path of a submodule or parameter."""
    path = pattern.partition(":")[0]
    names = [name for name, _ in module.named_modules()] + [name for name, _ in module.named_parameters()]
    return any(fnmatchcase(name, path) for name in names)


def made_ready(
    model: torch.nn.Module, inputs: Any, example_kwargs: Mapping[str, Any] | None, cache_length: int | None
) -> Prepared | None:
    """Return a model with its caches as buffers; None for one that keeps none, and is called like any other.

    Args:
        model: of ``transformers``, which generates; or a plain one (:mod:`~autopar.inference.plain_models`).
        inputs, example_kwargs: an example, as for :func:`autopar.parallelize`: a prompt of as many rows as the caches
            get; with an encoder, its longest input.
        cache_length: tokens of a sequence that the caches hold, prompt and answer.

    Raises:
        CaptureError, RunError: the model or the example is not one that is known.
    """
    check(cache_length=cache_length)
    if not isinstance(model, torch.nn.Module):
        return None  # which is refused where all arguments are looked at
    args, kwargs = split_inputs(inputs, example_kwargs)
    if _generates(model):
        return _of_hugging_face(model, args, dict(kwargs), cache_length)
    return _of_plain(model, args, dict(kwargs), cache_length)


def _generates(model: torch.nn.Module) -> bool:
    """Check for a model with the ``generate`` of ``transformers``, which is imported if there is one."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.GenerationMixin)


# --- models of transformers ------------------------------------------------------------------------------------------


def _of_hugging_face(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], length: int | None) -> Prepared:
    from autopar.inference.cached_models import CachedModel, EncoderModel, shapes_of
    from autopar.inference.generating import generating

    kind = type(model)
    if args:
        kwargs[model.main_input_name] = args[0]
    given = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
    main = given.get(model.main_input_name)
    if main is None:
        raise RunError(
            f"the example has {', '.join(given) or 'no tensors'}, and {kind.__name__} generates from "
            f"{model.main_input_name}: pass a tensor of this, with a row for each sequence that is generated at once"
        )
    if model.config._attn_implementation not in ("sdpa", "eager"):
        raise CaptureError(
            f"attention of {kind.__name__} is '{model.config._attn_implementation}', and its programs have masks that "
            "'sdpa' and 'eager' take: load the model with attn_implementation='sdpa'"
        )
    rows, source = main.shape[0], None
    if model.config.is_encoder_decoder:
        source = {n: t for n, t in given.items() if n == model.main_input_name or n == "attention_mask"}
        if main.ndim == 2:
            source.setdefault("attention_mask", torch.ones_like(main))
    length = length or _usual_length(model, 1 if source is not None else main.shape[1])
    shapes = shapes_of(model, rows, length, source)
    module = CachedModel(model, shapes).train(model.training)
    encoder = (EncoderModel(module), source) if source is not None else None
    reads = "position_ids" if source is None else "decoder_position_ids"
    call = one_token(module, reads in module.parts_read, main.device)
    names = module.cache_names()
    return Prepared(
        module, (), call, lambda pm, of_source: generating(model, kind, pm, shapes, names, of_source, source), encoder
    )  # fmt: skip


def _usual_length(model: Any, prompt: int) -> int:
    """Return a power of two with room behind the prompt, or what the model has positions for."""
    length = 1 << (prompt + ROOM - 1).bit_length()
    config = model.config.get_text_config(decoder=True)
    most = getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)
    return min(length, most) if most else length


def one_token(module: Any, positions: bool, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the call of one token of every row, which the plan is made for.

    With an encoder it is the first call: the only one that reads all parameters of the decoder.
    """
    shapes, config = module.shapes, module.model.config
    rows = torch.zeros(shapes.rows, 1, dtype=torch.long, device=device)
    mask = torch.ones(shapes.rows, 1, 1, shapes.length, dtype=torch.bool, device=device)
    source = torch.ones(shapes.rows, 1, 1, shapes.source_length, dtype=torch.bool, device=device)
    if config._attn_implementation == "eager":
        mask, source = (torch.zeros(one.shape, dtype=module.model.dtype, device=device) for one in (mask, source))
    call = {"tokens": rows, "places": rows.clone(), "last": rows.clone(), "mask": mask}
    if has_windows(config):
        call["window_mask"] = mask.clone()
    if positions:
        call["positions"] = rows.clone()
    if shapes.source_layers:
        call["source_mask"] = source
        size = shapes.rows, shapes.source_length, shapes.source_size
        call["source_states"] = torch.zeros(size, dtype=module.model.dtype, device=device)
    return call


def has_windows(config: Any) -> bool:
    """Check whether a model has layers that look back a window and others that do not, each with a mask."""
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    return "sliding_attention" in kinds and "full_attention" in kinds


# --- plain models ----------------------------------------------------------------------------------------------------


def _of_plain(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], length: int | None
) -> Prepared | None:
    tokens = args[0] if args else None
    if kwargs or not isinstance(tokens, torch.Tensor) or tokens.ndim != 2 or tokens.is_floating_point():
        return None
    if len(args) > 3 or not all(isinstance(one, torch.Tensor) for one in args[:2]):
        return None
    kind, module, example = type(model), model, args
    if len(args) == 3:
        if not all(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(args[2])):
            return None
        module, example = PassedCaches(model, args[2]).train(model.training), args[:2]
    names, seen = changed_buffers(module, example)
    if not names:
        return None
    holds = length or seen
    if holds is None:
        raise CaptureError(
            f"the caches of {kind.__name__} ({first_few(list(names))}) do not say how many tokens of a sequence they "
            "hold: pass cache_length="
        )
    loop_of: Callable[[Any], TokenLoop] = lambda pm: TokenLoop(pm, example, names, holds)  # noqa: E731
    return Prepared(module, _one_of(example), {}, lambda pm, _: given_generate(pm, kind, loop_of(pm)))


def _one_of(example: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the call of one token of every row."""
    return tuple(one[..., :1].contiguous() for one in example)
