"""A Hugging Face model whose own ``generate`` runs programs.

The object has the model's class, configuration and parameters; what differs is its forward, which gives a call of
``generate`` to :class:`~autopar.inference.cache_calls.CacheCalls`, and its cache, which holds no tensors: it says how
many tokens are in the module's buffers. So logits processors, sampling, stopping, streaming and beam search are those
of ``transformers``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, StaticLayer
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast, Seq2SeqLMOutput

from autopar.errors import RunError
from autopar.inference.cache_calls import CacheCalls, draw_alike
from autopar.inference.cached_models import CacheShapes, counts_by_mask
from autopar.plans.plan import Plan

MODES = (
    GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE
)  # fmt: skip
"""Ways to generate that need no cache which forgets tokens."""
CARRIED = {
    "input_ids", "decoder_input_ids", "attention_mask", "decoder_attention_mask", "position_ids",
    "decoder_position_ids", "past_key_values", "encoder_outputs", "use_cache", "return_dict", "logits_to_keep",
}  # fmt: skip
"""Arguments of a call of ``forward`` that reach the programs."""
TAKEN = "programs that generate take tokens, masks and positions alone; leave it out, or generate on one device"


class HostLayer(StaticLayer):
    """A layer of a cache that holds no tensors: how many tokens the buffers have."""

    def __init__(self, held: HeldTokens, length: int, sliding: bool) -> None:
        super().__init__(max_cache_len=length)
        self.held, self.is_sliding = held, sliding  # type: ignore[misc]

    def get_seq_length(self) -> Any:
        """Return how many tokens are held."""
        return self.held.count

    def get_mask_sizes(self, _: int) -> tuple[int, int]:
        """Return the length of the buffers, and the first position."""
        return self.max_cache_len, 0


class HeldTokens:
    """Number of tokens of each row that a cache has."""

    def __init__(self) -> None:
        self.count = 0


class HostCache(Cache):
    """Cache that ``generate`` hands from call to call.

    Args:
        calls: where the tensors are.
        sliding: of each layer, whether it looks back a window alone.
    """

    def __init__(self, calls: CacheCalls, sliding: list[bool]) -> None:
        self.calls, self.held = calls, HeldTokens()
        super().__init__(layers=[HostLayer(self.held, calls.length, s) for s in sliding])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Move sequences, as beam search asks."""
        self.calls.check_holder(self)
        self.calls.permute(beam_idx)

    def crop(self, max_length: int) -> None:
        """Forget tokens at the end: all but so many, or, of a negative number, so many."""
        held = self.held
        held.count = max(0, min(held.count, max_length if max_length >= 0 else held.count + max_length))

    def __deepcopy__(self, _: Any) -> Any:
        """Refuse: the tensors are the model's, which has them once."""
        raise RunError(
            "a cache of a model on ranks is in its programs and cannot be copied: generate from the whole sequence, or "
            "go on with the cache itself and crop() it back to the part that several texts share"
        )

    def reset(self) -> None:
        """Refuse: a call of generate begins with an empty cache anyway."""
        raise RunError("this cache is emptied by the next call of generate; leave past_key_values out")


class SourceCache(HostCache):
    """The cache of an encoder's output, which moves with the other one."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Do nothing: the buffers have moved."""


class EncoderCalls:
    """The encoder of a model, as ``generate`` calls it: the module's other program.

    Args:
        encoder: the model's own, for its signature.
        calls: where it runs.
        example: an input with the shapes that the program has, by argument.
    """

    def __init__(self, encoder: Any, calls: CacheCalls, example: Mapping[str, torch.Tensor]) -> None:
        self.calls, self.example = calls, example
        self.config, self.main_input_name = encoder.config, encoder.main_input_name
        self.forward = _signed(self._run, encoder.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the encoder's output, of its own length."""
        return self.forward(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> BaseModelOutput:
        kwargs.pop("return_dict", None)
        if args:
            kwargs[self.main_input_name] = args[0]
        given = {name: value for name, value in kwargs.items() if value is not None and value is not False}
        if unknown := sorted({name for name in given if name not in self.example}):
            raise RunError(
                f"the encoder is called with {', '.join(unknown)}, and was captured with {', '.join(self.example)}: "
                "pass the same arguments, or parallelize with an example that has these"
            )
        main = given[self.main_input_name]
        whole = {name: self._padded(name, given.get(name), main) for name in self.example}
        states = self.calls.encode(whole)
        if main.ndim == 2 and main.shape[1] < self.example[self.main_input_name].shape[1]:
            states = states[:, : main.shape[1]]
        return BaseModelOutput(last_hidden_state=states)  # type: ignore[arg-type]

    def _padded(self, name: str, tensor: torch.Tensor | None, main: torch.Tensor) -> torch.Tensor:
        """Return an input of the example's shape but for the rows: tokens are filled up, and masked."""
        wanted = self.example[name].shape[1:]
        if tensor is None:  # the mask, which says where tokens are
            tensor = torch.ones(main.shape[0], main.shape[1], dtype=self.example[name].dtype, device=main.device)
        tensor = tensor.to(self.example[name].dtype)
        can_fill = "attention_mask" in self.example and tensor.ndim == 2 and not main.is_floating_point()
        if tensor.shape[1:] != wanted and not (can_fill and tensor.shape[1] < wanted[0]):
            raise RunError(
                f"the encoder's {name} has {list(tensor.shape[1:])} in each row, and the program takes "
                f"{list(wanted)}{' or fewer tokens' if can_fill else ''}: pass this many, or parallelize with an "
                "example of the longest input"
            )
        more = wanted[0] - tensor.shape[1] if tensor.ndim == 2 else 0
        return torch.nn.functional.pad(tensor, (0, more)) if more else tensor


class Generates(GenerationMixin):
    """Base of a model that generates: a forward for ``generate``, and caches that are buffers of a module."""

    config: Any  # as the model's, which this is a base of
    device: torch.device
    dtype: torch.dtype
    calls: CacheCalls
    shapes: CacheShapes
    encoder_calls: EncoderCalls | None
    sliding: list[bool]
    counts_by_mask: bool
    """True where tokens that are filled up do not count in positions that a call leaves out: as in OPT."""
    in_generate = False
    """True while generate calls forward, which then gives the logits of the last token alone."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does, on all ranks alike; see ``transformers``.

        Every rank passes the same arguments. All draw as the first rank does: its generator's state goes to the
        others.

        Raises:
            RunError: what was asked needs more rows or tokens than the cache has, or a cache of another kind.
        """
        _refuse(kwargs.get("assistant_model") is not None, "assistant_model")
        _refuse(kwargs.get("custom_generate") is not None, "custom_generate")
        _refuse(kwargs.get("prompt_lookup_num_tokens") is not None, "prompt_lookup_num_tokens")
        self._check_inputs(kwargs)
        if not kwargs.get("disable_compile", True):
            raise RunError("disable_compile=False: programs are compiled by parallelize(compile=True); leave it out")
        draw_alike(self.device)
        of_model: Any = super()
        self.in_generate = True
        try:
            return of_model.generate(*args, **kwargs, disable_compile=True)
        finally:
            self.in_generate = False

    def _check_inputs(self, given: Mapping[str, Any]) -> None:
        """Refuse inputs that forward would refuse, before an encoder of images or sounds is run for them."""
        source = {self.encoder_calls.main_input_name} if self.encoder_calls is not None else set()
        read = {*inspect.signature(self.forward).parameters} - CARRIED - source  # type: ignore[attr-defined]
        if other := sorted(name for name in read if isinstance(given.get(name), torch.Tensor)):
            raise RunError(f"{', '.join(other)}: {TAKEN}")

    def get_encoder(self, *args: Any, **kwargs: Any) -> Any:
        """Return what runs the encoder."""
        of_model: Any = super()
        return self.encoder_calls if self.encoder_calls is not None else of_model.get_encoder(*args, **kwargs)

    @property
    def plan(self) -> Plan:
        """The plan of the programs that make tokens; that of an encoder is ``model.calls.encoder.plan``."""
        return self.calls.module.plan  # type: ignore[no-any-return]

    def new_cache(self) -> Cache:
        """Return an empty cache; the one before it holds nothing any more."""
        own = HostCache(self.calls, self.sliding)
        self.calls.begin(own)
        if self.encoder_calls is None:
            return own
        of_source = SourceCache(self.calls, self.sliding)
        both = EncoderDecoderCache(own, of_source)
        both.is_updated = dict.fromkeys(range(len(self.sliding)), False)
        return both

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, batch_size: int,
        max_cache_length: int, *_: Any,
    ) -> None:  # fmt: skip
        """Give ``generate`` a cache, once what is asked is known, and refuse what it cannot hold."""
        config = generation_config
        if generation_mode not in MODES:
            raise RunError(
                f"generation mode '{generation_mode.value}' needs a cache that forgets tokens or rows, which one in "
                f"buffers does not: use one of {', '.join(mode.value for mode in MODES)}, or one device"
            )
        _refuse(config.cache_implementation is not None, f"cache_implementation='{config.cache_implementation}'")
        _refuse(config.output_attentions, "output_attentions")
        _refuse(config.output_hidden_states, "output_hidden_states")
        if config.use_cache is False:
            raise RunError(
                "use_cache=False, as given or as in the model's generation_config, and a model on ranks generates from "
                "its cache: pass use_cache=True, or generate on one device"
            )
        self.calls.check_rows(max(config.num_beams, config.num_return_sequences) * batch_size)
        if max_cache_length > self.calls.length:
            raise RunError(
                f"the prompt and the new tokens need {max_cache_length} places, and the cache has "
                f"{self.calls.length}: generate fewer (max_new_tokens=), or parallelize with cache_length="
                f"{max_cache_length}"
            )
        given = model_kwargs.get("past_key_values")
        if given is None:
            model_kwargs["past_key_values"] = self.new_cache()
        elif not isinstance(own_part(given), HostCache):
            raise RunError(
                f"past_key_values is a {type(given).__name__} with tensors of its own, and this model's cache is in "
                "its programs: leave it out, or pass what the last call of generate returned"
            )

    def _advance(self, call: dict[str, Any]) -> Any:
        """Run a call of ``forward``.

        Raises:
            RunError: it has arguments that programs do not take.
        """
        left_out: tuple[Any, ...] = (None, False, {})  # generate passes a dict of encoded images, maybe empty
        given = {name: one for name, one in call.items() if isinstance(one, torch.Tensor) or one not in left_out}
        source = self._taken_source(given)
        if unknown := sorted(given.keys() - CARRIED):
            raise RunError(f"{', '.join(unknown)}: {TAKEN}")
        if (name := "input_ids" if self.encoder_calls is None else "decoder_input_ids") not in given:
            raise RunError(f"forward of {type(self).__name__} was called without {name}: pass the tokens")
        if source and "encoder_outputs" not in given:
            given["encoder_outputs"] = self.encoder_calls(**source)  # type: ignore[misc]
        if "past_key_values" not in given:
            given["past_key_values"] = self.new_cache()
        cache = given["past_key_values"]
        if not isinstance(own_part(cache), HostCache):
            raise RunError(
                f"past_key_values is a {type(cache).__name__} with tensors of its own, and this model's cache is in "
                "its programs: leave it out, or pass model.new_cache() or what the last call returned"
            )
        return self._advance_cache(given, own_part(cache))

    def _taken_source(self, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Take an encoder's input out of the arguments of a call, and return it with its mask."""
        if self.encoder_calls is None or self.encoder_calls.main_input_name not in given:
            return {}
        source = {self.encoder_calls.main_input_name: given.pop(self.encoder_calls.main_input_name)}
        return source | {name: given[name] for name in ("attention_mask",) if name in given}

    def _advance_cache(self, given: dict[str, Any], own: HostCache) -> Any:
        calls = self.calls
        calls.check_holder(own)
        prefix = "decoder_" if self.encoder_calls is not None else ""
        tokens, start = given[f"{prefix}input_ids"], own.held.count
        mask = given.get(f"{prefix}attention_mask")
        if isinstance(mask, Mapping):
            masks = {"mask": mask.get("full_attention"), "window_mask": mask.get("sliding_attention")}
        else:
            masks = {"mask": mask}
        rows, count = tokens.shape
        masks = {name: self._whole(one, rows, count, start) for name, one in masks.items()}
        numbers = given.get(f"{prefix}position_ids")
        if numbers is None and self.counts_by_mask and isinstance(mask, torch.Tensor) and mask.ndim == 2:
            numbers = (mask.long().cumsum(1) * mask.long() - 1)[:, start : start + count]
        positions = self._positions(numbers, rows, count, start)
        source: dict[str, torch.Tensor] = {}
        if self.encoder_calls is not None:
            if "encoder_outputs" not in given:
                raise RunError(
                    f"forward of {type(self).__name__} was called without {self.encoder_calls.main_input_name}: pass "
                    "it, or encoder_outputs=model.get_encoder()(...)"
                )
            states = given["encoder_outputs"][0]
            source["source_mask"] = self._source_mask(given.get("attention_mask"), states)
            if start == 0:
                more = self.shapes.source_length - states.shape[1]
                source["source_states"] = torch.nn.functional.pad(states, (0, 0, 0, more)) if more else states
        keep = given.get("logits_to_keep", int(self.in_generate))
        every = isinstance(keep, torch.Tensor) or keep != 1
        logits = calls.advance(tokens, start, positions, masks, source, every)
        if every:
            logits = logits[:, keep if isinstance(keep, torch.Tensor) else slice(-keep, None)]
        own.held.count += count
        if self.encoder_calls is not None:
            return Seq2SeqLMOutput(logits=logits, past_key_values=given["past_key_values"])  # type: ignore[arg-type]
        return CausalLMOutputWithPast(logits=logits, past_key_values=given["past_key_values"])  # type: ignore[arg-type]

    def _positions(self, given: torch.Tensor | None, rows: int, count: int, start: int) -> torch.Tensor | None:
        if not self.calls.positions:
            return None
        if given is None:
            given = torch.arange(start, start + count, device=self.device)[None]
        if given.ndim != 2 or given.shape[1] != count:
            raise RunError(
                f"position_ids have the shape {list(given.shape)} for {rows} rows of {count} tokens: give one number "
                "for each token; models that number tokens in several ways cannot be run on ranks"
            )
        return given.expand(rows, -1)

    def _whole(self, mask: torch.Tensor | None, rows: int, count: int, start: int) -> torch.Tensor:
        """Return a mask ``[rows, 1, tokens, length]``; where it is left out, each token sees all before it."""
        if mask is not None and mask.ndim == 4:
            return mask.expand(rows, -1, -1, -1)
        every = torch.arange(self.calls.length, device=self.device)
        bits = (every <= torch.arange(start, start + count, device=self.device)[:, None]).expand(rows, 1, -1, -1)
        if mask is not None:
            if mask.shape[1] not in (start + count, self.calls.length):  # generate itself may fill it up
                raise RunError(
                    f"attention_mask has {mask.shape[1]} entries in each row, and {start} tokens in the cache with "
                    f"{count} new ones are {start + count}: pass one entry for each, or leave it out"
                )
            bits = bits & torch.nn.functional.pad(mask.bool(), (0, self.calls.length - mask.shape[1]))[:, None, None]
        return self._as_added(bits)

    def _source_mask(self, mask: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
        """Return what of the encoder's output is attended to, ``[rows, 1, 1, source_length]``."""
        rows, length = states.shape[:2]
        if mask is None or (mask.shape[1] != length and bool(mask.all())):
            mask = torch.ones(rows, length, device=states.device)
        if mask.shape[1] != length:
            raise RunError(
                f"attention_mask has {mask.shape[1]} entries for an encoder's output of {length} positions: a mask of "
                "an input that the encoder shortens cannot be run on ranks; leave it out"
            )
        bits = torch.nn.functional.pad(mask.bool(), (0, self.shapes.source_length - length))
        return self._as_added(bits[:, None, None])

    def _as_added(self, bits: torch.Tensor) -> torch.Tensor:
        """Return a mask as the model's attention takes it: bools, or what is added to scores."""
        if self.config._attn_implementation != "eager":
            return bits
        zero = torch.zeros((), dtype=self.dtype, device=bits.device)
        return zero.masked_fill(~bits, torch.finfo(self.dtype).min)


def own_part(cache: Any) -> Any:
    """Return the part of a cache that is of the tokens generated so far."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def _refuse(asked: bool, what: str) -> None:
    if asked:
        raise RunError(
            f"{what} of generate cannot be had of a model on ranks, whose cache is a state of its programs of a fixed "
            "shape: leave it out, or generate on one device"
        )


def _signed(function: Any, other: Any) -> Any:
    """Return a function with the signature of another one, which ``generate`` reads."""

    def signed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signed.__signature__ = inspect.signature(other)  # type: ignore[attr-defined]
    return signed


def sliding_layers(config: Any, layers: int) -> list[bool]:
    """Return of each layer whether it looks back a window alone."""
    known = list(DynamicCache(config=config.get_text_config(decoder=True)).is_sliding)
    return [known[i] if i < len(known) else False for i in range(layers)]


def generating(
    model: Any, kind: Any, module: Any, shapes: CacheShapes, cache_names: tuple[str, ...],
    encoder: Any = None, source: Mapping[str, torch.Tensor] | None = None,
) -> Any:  # fmt: skip
    """Return an object of the model's class whose ``generate`` runs a module's programs.

    Args:
        model: the model of ``transformers`` within the module.
        kind: the class that it was written as.
        module: a :class:`~autopar.inference.cached_models.CachedModel` of it, or what ``parallelize`` made of one.
        shapes, cache_names: of the module's caches.
        encoder: an :class:`~autopar.inference.cached_models.EncoderModel`, or what ``parallelize`` made of one.
        source: an example input of the encoder.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._advance({**dict(zip(names, args, strict=False)), **kwargs})

    names = tuple(inspect.signature(kind.forward).parameters)[1:]
    own = type(kind.__name__, (Generates, kind), {"forward": functools.wraps(kind.forward)(forward)})
    shown: Any = object.__new__(own)
    shown.__dict__.update(vars(model))
    reads = "position_ids" if source is None else "decoder_position_ids"
    calls = CacheCalls(module, shapes.rows, shapes.length, cache_names, reads in names, encoder)
    encoder_calls = None
    if encoder is not None:
        assert source is not None
        _put_back(shown, encoder)
        encoder_calls = EncoderCalls(encoder.get_submodule(encoder.path), calls, source)
    shown.__dict__.update(
        calls=calls, shapes=shapes, encoder_calls=encoder_calls, counts_by_mask=counts_by_mask(model),
        sliding=sliding_layers(model.config, 1 + max([*shapes.layers, *(shapes.source_layers or {})])),
    )  # fmt: skip
    return shown


def _put_back(shown: Any, encoder: Any) -> None:
    """Show the encoder where it was, without changing the modules that programs are captured from."""
    path = encoder.path.split(".")[1:]
    place = shown
    for name in path[:-1]:
        place._modules = dict(place._modules)
        above, below = place, place._modules[name]
        place = object.__new__(type(below))
        place.__dict__.update(vars(below))
        above._modules[name] = place
    place._modules = {**place._modules, path[-1]: encoder.get_submodule(encoder.path)}
