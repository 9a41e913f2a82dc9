"""Families of ``transformers`` that see or hear in ways of their own: grids of patches, pictures that may be padding,
videos, masks that are asked for by points, sound as codes, and actions.

Models without a loss of their own are asked for small outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from zoo import Batch
from zoo_composed import CLASSES, ROWS, SEE, SEQ, TEXT, VOCAB, Feed, composed

IMAGE = 40


class Small(nn.Module):
    """A model whose loss is how large some of its outputs are."""

    def __init__(self, model: nn.Module, *outputs: str) -> None:
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, **given: Any) -> Tensor:
        made = self.model(**given)
        return torch.stack([made[name].square().mean() for name in self.outputs]).sum()


def _with_pictures(g: torch.Generator, n: int, **pictures: Tensor) -> Batch:
    """Tokens of full rows, of which ``n`` stand for a picture."""
    ids = torch.randint(4, 39, (ROWS, SEQ), generator=g)
    labels = ids.where(torch.rand(ids.shape, generator=g) < 0.7, -100)
    ids[:, 1 : 1 + n], labels[:, 1 : 1 + n] = IMAGE, -100
    return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, **pictures}


def _in_patches(g: torch.Generator, n_values: int) -> Batch:
    """Each row has a picture of 4x4 patches, which become 2x2 tokens."""
    grid = torch.tensor([[1, 4, 4]] * ROWS)
    patches = torch.randn(ROWS * 16, n_values, generator=g)
    args, given = _with_pictures(g, 4, pixel_values=patches, image_grid_thw=grid)
    return args, {**given, "mm_token_type_ids": (given["input_ids"] == IMAGE).long()}


_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
_MARKS = dict(image_token_id=IMAGE, video_token_id=41, vision_start_token_id=43, vision_end_token_id=44)
_PATCHES = dict(depth=2, hidden_size=32, num_heads=4, intermediate_size=48, patch_size=4, spatial_merge_size=2,
                temporal_patch_size=2, out_hidden_size=32)  # fmt: skip


@composed
def qwen2_5_vl() -> tuple[nn.Module, Feed]:
    """Windows of patches, of which each picture has others."""
    import transformers

    vision = dict(_PATCHES, window_size=16, fullatt_block_indexes=[1])
    config = transformers.Qwen2_5_VLConfig(
        text_config=dict(TEXT, rope_parameters=_ROPE), vision_config=vision, tie_word_embeddings=False, **_MARKS
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config), lambda g: _in_patches(g, 3 * 2 * 16)


@composed
def qwen3_vl() -> tuple[nn.Module, Feed]:
    """Positions of patches are interpolated, as many as their grids say."""
    import transformers

    vision = dict(_PATCHES, num_position_embeddings=16, deepstack_visual_indexes=[0])
    text = dict(TEXT, head_dim=8, rope_parameters=_ROPE)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **_MARKS)
    return transformers.Qwen3VLForConditionalGeneration(config), lambda g: _in_patches(g, 3 * 2 * 16)


@composed
def idefics3() -> tuple[nn.Module, Feed]:
    """Pictures that are padding, all zeros, are left out."""
    import transformers

    config = transformers.Idefics3Config(
        text_config=dict(TEXT, model_type="llama"), vision_config=SEE, scale_factor=2, image_token_id=IMAGE,
        pad_token_id=0, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return _with_pictures(g, 1, pixel_values=torch.randn(ROWS, 1, 3, 16, 16, generator=g))

    return transformers.Idefics3ForConditionalGeneration(config), feed


@composed
def encodec() -> tuple[nn.Module, Feed]:
    """Sound to codes and back; its padding follows from strides that are buffers."""
    import transformers

    config = transformers.EncodecConfig(
        num_filters=8, upsampling_ratios=[4, 2], hidden_size=16, codebook_size=32, codebook_dim=16,
        target_bandwidths=[24.0], sampling_rate=16000,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return (), {"input_values": torch.randn(ROWS, 1, 64, generator=g)}

    return Small(transformers.EncodecModel(config), "audio_values"), feed


def _video(g: torch.Generator, frames: int = 4, size: int = 16) -> Batch:
    return (), {"pixel_values": torch.randn(ROWS, frames, 3, size, size, generator=g),
                "labels": torch.randint(0, CLASSES, (ROWS,), generator=g)}  # fmt: skip


@composed
def videomae() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.VideoMAEConfig(**SEE, num_frames=4, tubelet_size=2, num_labels=CLASSES)
    return transformers.VideoMAEForVideoClassification(config), _video


@composed
def vivit() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.VivitConfig(
        **SEE, num_frames=4, tubelet_size=[2, 8, 8], num_labels=CLASSES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.VivitForVideoClassification(config), _video


@composed
def timesformer() -> tuple[nn.Module, Feed]:
    """Attention over time and over space in turn."""
    import transformers

    config = transformers.TimesformerConfig(**SEE, num_frames=4, num_labels=CLASSES, drop_path_rate=0)
    return transformers.TimesformerForVideoClassification(config), _video


@composed
def sam() -> tuple[nn.Module, Feed]:
    """Masks of what stands at given points."""
    import transformers

    sees = dict(
        SEE, output_channels=32, patch_size=4, window_size=2, global_attn_indexes=[1], num_pos_feats=16, mlp_dim=48
    )
    asked = dict(hidden_size=32, image_size=16, patch_size=4, mask_input_channels=4)
    config = transformers.SamConfig(
        vision_config=sees, prompt_encoder_config=asked,
        mask_decoder_config=dict(hidden_size=32, mlp_dim=48, num_attention_heads=4, iou_head_hidden_dim=16),
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return (), {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=g),
                    "input_points": torch.rand(ROWS, 1, 2, 2, generator=g) * 15,
                    "input_labels": torch.ones(ROWS, 1, 2, dtype=torch.int64)}  # fmt: skip

    return Small(transformers.SamModel(config), "pred_masks", "iou_scores"), feed


@composed
def decision_transformer() -> tuple[nn.Module, Feed]:
    """Returns, states and actions in turn."""
    import transformers

    config = transformers.DecisionTransformerConfig(
        state_dim=6, act_dim=3, hidden_size=32, max_ep_len=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, vocab_size=VOCAB,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        numbers = {"states": 6, "actions": 3, "rewards": 1, "returns_to_go": 1}
        return (), {**{name: torch.randn(ROWS, 8, n, generator=g) for name, n in numbers.items()},
                    "timesteps": torch.randint(0, 32, (ROWS, 8), generator=g),
                    "attention_mask": torch.ones(ROWS, 8, dtype=torch.int64)}  # fmt: skip

    return Small(transformers.DecisionTransformerModel(config), "action_preds", "state_preds"), feed


__all__ = ["Small"]
