"""A Hugging Face model as a module of tensors alone, whose caches are buffers.

``transformers`` hands a cache object from call to call, and the model's layers write into it. Here the object is made
anew in each forward, over buffers of the module, so that a cache is what any other state of a model is: a buffer that
forward changes. What a program is called with are tensors of fixed shapes; where in the cache they are written is one
of them, so nothing depends on values. Models are told apart by what they do, not by their names: which layers write a
cache, and of which shape, is seen in one small forward.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, EncoderDecoderCache, StaticLayer
from transformers.modeling_outputs import BaseModelOutput

from autopar.errors import CaptureError


@dataclass(frozen=True)
class LayerShape:
    """Sizes of the key and value that a layer writes into its cache for one token.

    Attributes:
        heads: key and value heads.
        key_size, value_size: elements of a head's key and value.
    """

    heads: int
    key_size: int
    value_size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class CacheShapes:
    """Caches of a model.

    Attributes:
        rows: sequences that are held at once.
        length: tokens of a sequence.
        layers: by number, those that write.
        source_length: positions of the encoder's output; 0 without an encoder.
        source_layers: those that attend to the encoder's output.
        source_size: elements of a position of it.
    """

    rows: int
    length: int
    layers: Mapping[int, LayerShape]
    source_length: int = 0
    source_layers: Mapping[int, LayerShape] | None = None
    source_size: int = 0


class SeenLayer(StaticLayer):
    """A layer of a cache that notes the shapes that are written, and gives back what it was given."""

    def __init__(self) -> None:
        super().__init__(max_cache_len=1)
        self.seen: LayerShape | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note the shapes of the keys and values of ``[rows, heads, tokens, size]``."""
        heads, key_size, value_size = key_states.shape[1], key_states.shape[3], value_states.shape[3]
        self.seen = LayerShape(heads, key_size, value_size, key_states.dtype)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many positions the keys have, and the first."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0: nothing is kept."""
        return 0


class SeenCache(Cache):
    """A cache with a layer for every number that a model asks for."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=SeenLayer)

    def of_layers(self) -> dict[int, LayerShape]:
        """Return the shapes of the layers that wrote."""
        layers: list[Any] = self.layers
        return {i: layer.seen for i, layer in enumerate(layers) if layer.seen is not None}


class PlacedLayer(StaticLayer):
    """A layer of a cache in two buffers, written at places that are a tensor.

    Args:
        keys, values: buffers of ``[rows, heads, length, size]``.
        places: positions of the new tokens in the cache, ``[rows, tokens]``.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.places = keys, values, places
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of ``[rows, heads, tokens, size]``; return the whole cache."""
        assert self.keys is not None and self.values is not None
        at = self.places[:, None, :, None]
        self.keys.scatter_(2, at.expand(key_states.shape), key_states)
        self.values.scatter_(2, at.expand(value_states.shape), value_states)
        return self.keys, self.values

    def get_seq_length(self) -> Any:
        """Return the place of the first new token, a tensor of shape []."""
        return self.places[0, 0]


class WholeLayer(StaticLayer):
    """A layer of a cache that is written at once: keys and values of an encoder's output."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of ``[rows, heads, source_length, size]``."""
        assert self.keys is not None and self.values is not None
        self.keys.copy_(key_states)
        self.values.copy_(value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return how many positions it has."""
        return self.max_cache_len


class CachedModel(torch.nn.Module):
    """A model with caches as buffers, of which tensors are asked and given.

    Args:
        model: a model of ``transformers`` that generates.
        shapes: of its caches; buffers ``keys_0``, ``values_0`` and so on are made, which are not saved.
    """

    def __init__(self, model: Any, shapes: CacheShapes) -> None:
        super().__init__()
        self.model, self.shapes = model, shapes
        device = next(model.parameters()).device
        for prefix, layers, length in (
            ("", shapes.layers, shapes.length), ("source_", shapes.source_layers or {}, shapes.source_length)
        ):  # fmt: skip
            for i, of in layers.items():
                for what, size in (("keys", of.key_size), ("values", of.value_size)):
                    zeros = torch.zeros(shapes.rows, of.heads, length, size, dtype=of.dtype, device=device)
                    self.register_buffer(f"{prefix}{what}_{i}", zeros, persistent=False)
        head = model.get_output_embeddings()  # asked now: some models look for it in the encoder, which is taken out
        self.head_path = next(name for name, one in model.named_modules() if one is head)
        self.parts_read = tuple(inspect.signature(model.forward).parameters)
        self.n_layers = 1 + max([*shapes.layers, *(shapes.source_layers or {})])

    def forward(
        self,
        tokens: torch.Tensor,
        places: torch.Tensor,
        last: torch.Tensor,
        positions: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        window_mask: torch.Tensor | None = None,
        source_states: torch.Tensor | None = None,
        source_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Advance all rows by some tokens, and return the logits behind those that are asked for.

        Args:
            tokens: new tokens, int64 ``[rows, tokens]``.
            places: where in the cache their keys and values go, int64 ``[rows, tokens]``.
            last: numbers of the new tokens of a row whose logits are wanted, int64 ``[rows, kept]``: of most calls the
                last one.
            positions: numbers of the tokens in their sequences, as the model counts them, int64 ``[rows, tokens]``.
            mask: what each new token attends to, bool or in the model's dtype, ``[rows, 1, tokens, length]``.
            window_mask: the same for layers that look back a window alone.
            source_states: output of the encoder ``[rows, source_length, size]``, in the first call; its keys and values
                are kept for the others.
            source_mask: what of the encoder's output is attended to, ``[rows, 1, 1, source_length]``.

        Returns:
            Logits ``[rows, kept, vocabulary]``.
        """
        encodes = bool(self.shapes.source_layers)
        call: dict[str, Any] = {"past_key_values": self._cache(places, source_states), "use_cache": True}
        masks = mask
        if window_mask is not None:
            masks = {"full_attention": mask, "sliding_attention": window_mask}  # type: ignore[assignment]
        prefix = "decoder_" if encodes else ""
        call[f"{prefix}input_ids"], call[f"{prefix}attention_mask"] = tokens, masks
        if positions is not None:
            call[f"{prefix}position_ids"] = positions
        if encodes:
            states = source_states if source_states is not None else self._no_states(tokens)
            call["encoder_outputs"] = BaseModelOutput(last_hidden_state=states)
            if source_mask is not None:
                call["attention_mask"] = source_mask.expand(-1, -1, tokens.shape[1], -1)
        with _last_of(self.model.get_submodule(self.head_path), last):
            return self.model(**call, return_dict=True).logits  # type: ignore[no-any-return]

    def _cache(self, places: torch.Tensor, source_states: torch.Tensor | None) -> Cache:
        """Return a cache of ``transformers`` over the buffers."""
        own = Cache(layers=[
            PlacedLayer(getattr(self, f"keys_{i}"), getattr(self, f"values_{i}"), places)
            if i in self.shapes.layers else StaticLayer(0) for i in range(self.n_layers)
        ])  # fmt: skip
        if not self.shapes.source_layers:
            return own
        of_source = Cache(layers=[
            WholeLayer(getattr(self, f"source_keys_{i}"), getattr(self, f"source_values_{i}"))
            if i in self.shapes.source_layers else StaticLayer(0) for i in range(self.n_layers)
        ])  # fmt: skip
        both = EncoderDecoderCache(own, of_source)
        both.is_updated = {i: source_states is None for i in both.is_updated}
        return both

    def _no_states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what stands for the encoder's output where its keys and values are in the cache: it is not read."""
        dtype = next(self.model.parameters()).dtype
        return torch.zeros(tokens.shape[0], self.shapes.source_length, 1, dtype=dtype, device=tokens.device)

    def reset_parameters(self) -> None:
        """Empty the caches, of a model on the meta device too."""
        for name in self.cache_names():
            getattr(self, name).zero_()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Set the values of one module of a model on the meta device, as the model does."""
        if isinstance(module, CachedModel):
            module.reset_parameters()
        else:
            self.model._init_weights(module)

    def cache_names(self) -> tuple[str, ...]:
        """Return the names of the buffers that are caches."""
        return tuple(
            f"{prefix}{what}_{i}"
            for prefix, layers in (("", self.shapes.layers), ("source_", self.shapes.source_layers or {}))
            for i in layers for what in ("keys", "values")
        )  # fmt: skip


class EncoderModel(torch.nn.Module):
    """The encoder of a model, apart from it: it runs once for each input, by a plan of its own.

    The rest of the model is left without it. Weights that both read, such as embeddings, are copied.

    Args:
        module: a model with an encoder.
    """

    def __init__(self, module: CachedModel) -> None:
        super().__init__()
        encoder: torch.nn.Module = module.model.get_encoder()
        self.path = next(name for name, one in module.named_modules() if one is encoder)
        above, _, name = self.path.rpartition(".")
        owner = module.get_submodule(above)
        owner.register_module(name, TakenOut())
        self.taken: list[tuple[dict[str, Any], str, Any]] = [(owner._modules, name, encoder)]
        try:
            self.taken += _own_weights(encoder, module)
        except CaptureError:
            self.put_back()
            raise
        place: torch.nn.Module = self
        for one in above.split("."):  # so that operators and parameters have the names that they have in the model
            place.add_module(one, torch.nn.Module())
            place = place.get_submodule(one)
        place.add_module(name, encoder)
        self.train(module.training)

    def forward(self, **source: torch.Tensor) -> torch.Tensor:
        """Return the output ``[rows, positions, size]`` for inputs by argument."""
        encoder: Any = self.get_submodule(self.path)
        return encoder(**source, return_dict=True).last_hidden_state  # type: ignore[no-any-return]

    def put_back(self) -> None:
        """Make the model what it was."""
        for entries, name, value in self.taken:
            entries[name] = value

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Set the values of one module of a model on the meta device, as the model does."""
        encoder: Any = self.get_submodule(self.path)
        encoder._init_weights(module)


class TakenOut(torch.nn.Module):
    """An empty module in the place of the encoder."""


def _own_weights(encoder: torch.nn.Module, rest: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Copy the weights of an encoder that the rest reads, too; return what they were, and where.

    Raises:
        CaptureError: they have no values yet, and would get different ones.
    """
    others = {id(param) for param in rest.parameters()}
    copies: dict[int, torch.nn.Parameter] = {}
    before: list[tuple[dict[str, Any], str, Any]] = []
    for one in encoder.modules():
        for key, param in one._parameters.items():
            if param is not None and id(param) in others:
                if param.is_meta:
                    raise CaptureError(
                        f"{key} of a {type(one).__name__} is of the encoder and of the decoder, which are spread "
                        "apart, and on the meta device each would get values of its own: build the model on the CPU"
                    )
                before.append((one._parameters, key, param))
                copies.setdefault(id(param), torch.nn.Parameter(param.detach().clone(), param.requires_grad))
                one._parameters[key] = copies[id(param)]
    return before


@contextlib.contextmanager
def _last_of(head: torch.nn.Module, last: torch.Tensor) -> Iterator[None]:
    """Let the head over the vocabulary compute the tokens asked for, ``[rows, kept]``: a prompt has many more."""
    whole = type(head).forward

    def of_last(states: torch.Tensor) -> torch.Tensor:
        at = last[:, :, None].expand(-1, -1, states.shape[2])
        return whole(head, states.gather(1, at) if states.shape[1] > last.shape[1] else states)  # type: ignore[no-any-return]

    head.forward = of_last  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward


def _check_masks(model: Any) -> None:
    """Refuse masks that would be wrong over a cache whose length stays.

    Raises:
        CaptureError: it says which ones.
    """
    kind = type(model).__name__
    for name, one in model.named_buffers():
        if one.dtype == torch.bool and one.ndim == 4 and one.shape[2] == one.shape[3] > 1:
            raise CaptureError(
                f"{kind} keeps masks of its own ({name}, {list(one.shape)}), of which it takes the last rows of a "
                "cache that grows, and caches of programs have a fixed length: generate with it on one device"
            )
    kinds = {*(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())}
    if other := kinds - {"full_attention", "sliding_attention"}:
        raise CaptureError(
            f"{kind} has layers of {', '.join(sorted(other))}, and masks of programs are those of full_attention and "
            "sliding_attention: generate with it on one device"
        )


def _seen(model: Any) -> dict[str, torch.Tensor]:
    """Return the mask of one token, in the form in which programs have masks, and its position if one is taken."""
    device = next(model.parameters()).device
    call = {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        call["position_ids"] = torch.zeros(1, 1, dtype=torch.long, device=device)
    return call


def shapes_of(model: Any, rows: int, length: int, source: Mapping[str, torch.Tensor] | None = None) -> CacheShapes:
    """Return the shapes of a model's caches, from one forward of one token.

    Args:
        model: on any device, meta too.
        rows, length: sequences, and tokens of each.
        source: an example input of the encoder, ``[rows, positions, ...]``, by argument.

    Raises:
        CaptureError: the model keeps another kind of state, or none.
    """
    device = next(model.parameters()).device
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    own, of_source = SeenCache(), SeenCache()
    training, states = model.training, None
    model.eval()
    try:
        with torch.no_grad():
            if source is None:
                model(input_ids=token, past_key_values=own, use_cache=True, **_seen(model))
            else:
                # A mask says nothing of shapes, and its values are asked for, which one on the meta device has not.
                one = {name: tensor[:1].to(device) for name, tensor in source.items() if name != "attention_mask"}
                states = model.get_encoder()(**one, return_dict=True)
                both = EncoderDecoderCache(own, of_source)
                both.is_updated = dict.fromkeys(range(10**4), False)
                model(decoder_input_ids=token, encoder_outputs=states, past_key_values=both, use_cache=True)
    except Exception as error:
        raise CaptureError(
            f"one token of {type(model).__name__} with a cache of keys and values failed ({type(error).__name__}: "
            f"{error}): recurrent states, caches of a class of the model's own, and biases made of the mask (ALiBi) "
            "cannot be kept in programs; generate with it on one device"
        ) from error
    finally:
        model.train(training)
    layers = own.of_layers()
    if not layers:
        raise CaptureError(
            f"{type(model).__name__} writes no keys and values into the cache that it is given: it keeps no cache, or "
            "a recurrent state, which cannot be kept in programs; generate with it on one device"
        )
    _check_masks(model)
    source_length, source_size = (0, 0) if states is None else states.last_hidden_state.shape[1:]
    return CacheShapes(rows, length, layers, source_length, of_source.of_layers() or None, source_size)


def counts_by_mask(model: torch.nn.Module) -> bool:
    """Check for an embedding of positions that is told the mask."""
    embeddings = (one for one in model.modules() if isinstance(one, torch.nn.Embedding))
    return any("attention_mask" in inspect.signature(one.forward).parameters for one in embeddings)
