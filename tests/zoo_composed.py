"""Families of ``transformers`` that a row of a table does not describe: several configurations, or a loss of one's own.

Detection and segmentation models match their queries with the targets outside of torch (scipy's assignment): here the
targets are those of the queries already, as after a matching, and the loss is the usual one of classes and boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import Batch, Case, as_float64

ROWS, SEQ, VOCAB, CLASSES, QUERIES = 4, 16, 48, 5, 6

COMPOSED: dict[str, Callable[[], Case]] = {}

TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, use_cache=False,
)  # fmt: skip
SEE: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8,
    attention_dropout=0.0,
)  # fmt: skip

SINGLE = ("autoformer",)
"""Families that do not run in double precision."""

Feed = Callable[[torch.Generator], Batch]
Recipe = Callable[[], tuple[nn.Module, Feed]]


def composed(recipe: Recipe) -> Recipe:
    """Register a function that builds a model and what feeds it, under its own name."""

    def case() -> Case:
        torch.manual_seed(0)
        model, feed = recipe()
        (args, kwargs), batch2 = (feed(torch.Generator().manual_seed(seed)) for seed in (1, 2))
        case = Case(recipe.__name__, model.train(), args, kwargs, "outputs.loss", batch2)
        return case if case.name in SINGLE else as_float64(case)

    COMPOSED[recipe.__name__] = case
    return recipe


class Judged(nn.Module):
    """A model with a loss of its outputs and a last argument."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, *args: Tensor) -> Tensor:
        return self.loss(self.model(*args[:-1]), args[-1])


# --- batches ---------------------------------------------------------------------------------------------------------


def pictures(g: torch.Generator, size: int = 16) -> Tensor:
    return torch.randn(ROWS, 3, size, size, generator=g)


def numbers(g: torch.Generator, *shape: int, low: int = 3, high: int = VOCAB) -> Tensor:
    return torch.randint(low, high, shape or (ROWS, SEQ), generator=g)


def with_picture(token: int, places: int, size: int = 16, **more: Any) -> Feed:
    """Tokens of which the first few stand for a picture's patches; there are no labels at those."""

    def feed(g: torch.Generator) -> Batch:
        ids = numbers(g, high=VOCAB - 4)
        labels = ids.clone()
        ids[:, 1 : 1 + places] = token
        labels[:, 1 : 1 + places] = -100
        return (), {"input_ids": ids, "pixel_values": pictures(g, size), "attention_mask": torch.ones_like(ids),
                    "labels": labels, **more}  # fmt: skip

    return feed


def _boxes(g: torch.Generator, size: int) -> Batch:
    targets = torch.cat([torch.rand(ROWS, QUERIES, 4, generator=g),
                         torch.randint(0, CLASSES, (ROWS, QUERIES, 1), generator=g).float()], -1)  # fmt: skip
    return (pictures(g, size), targets), {}


def boxes_and_classes(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of matched queries: cross-entropy of classes, L1 of boxes."""
    classes = F.cross_entropy(outputs.logits.flatten(0, 1), targets[..., 4].long().flatten())
    return classes + 5 * F.l1_loss(outputs.pred_boxes, targets[..., :4])


# --- detection and segmentation --------------------------------------------------------------------------------------


def _resnet() -> Any:
    import transformers

    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip


def _detector(kind: str, **own: Any) -> tuple[nn.Module, Feed]:
    import transformers

    config = getattr(transformers, kind + "Config")(
        backbone_config=_resnet(), use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=32,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, num_queries=QUERIES, dropout=0.0, num_labels=CLASSES, **own,
    )  # fmt: skip
    model = getattr(transformers, kind + "ForObjectDetection")(config)
    return Judged(model, boxes_and_classes), lambda g: _boxes(g, 64)


@composed
def detr() -> tuple[nn.Module, Feed]:
    return _detector("Detr")


@composed
def conditional_detr() -> tuple[nn.Module, Feed]:
    return _detector("ConditionalDetr")


@composed
def deformable_detr() -> tuple[nn.Module, Feed]:
    return _detector("DeformableDetr", encoder_n_points=2, decoder_n_points=2)


@composed
def table_transformer() -> tuple[nn.Module, Feed]:
    return _detector("TableTransformer")


@composed
def yolos() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.YolosConfig(
        **{**SEE, "image_size": [16, 16]}, num_detection_tokens=QUERIES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, num_labels=CLASSES,
    )  # fmt: skip
    return Judged(transformers.YolosForObjectDetection(config), boxes_and_classes), lambda g: _boxes(g, 16)


def _masks(size: int, part: int) -> Feed:
    """For every query a class, and the pixels that it has."""

    def feed(g: torch.Generator) -> Batch:
        masks = (torch.rand(ROWS, QUERIES, size // part, size // part, generator=g) < 0.4).float()
        classes = torch.randint(0, CLASSES, (ROWS, QUERIES, 1, 1), generator=g).float()
        return (pictures(g, size), torch.cat([masks, classes.expand_as(masks[..., :1, :])], dim=2)), {}

    return feed


def masks_and_classes(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of matched queries: cross-entropy of classes, and of pixels with the dice loss."""
    masks, labels = targets[:, :, :-1], targets[:, :, -1, 0].long()
    logits = outputs.masks_queries_logits
    share = logits.sigmoid()
    dice = 1 - (2 * (share * masks).sum((2, 3)) + 1) / (share.sum((2, 3)) + masks.sum((2, 3)) + 1)
    classes = F.cross_entropy(outputs.class_queries_logits.flatten(0, 1), labels.flatten())
    return classes + F.binary_cross_entropy_with_logits(logits, masks) + dice.mean()


def _without_scipy(name: str, build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model whose own loss, which is not used here, wants scipy."""
    with mock.patch(f"transformers.models.{name}.modeling_{name}.requires_backends"):
        return build()


@composed
def mask2former() -> tuple[nn.Module, Feed]:
    import transformers

    backbone = transformers.SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4,
        drop_path_rate=0.0, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=48,
        encoder_layers=1, decoder_layers=2, num_attention_heads=4, dim_feedforward=48, num_queries=QUERIES,
        num_labels=CLASSES,
    )  # fmt: skip
    model = _without_scipy("mask2former", lambda: transformers.Mask2FormerForUniversalSegmentation(config))
    return Judged(model, masks_and_classes), _masks(64, 4)


@composed
def maskformer() -> tuple[nn.Module, Feed]:
    import transformers

    decoder = transformers.DetrConfig(
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_queries=QUERIES, dropout=0.0, backbone_config=_resnet(),
    )  # fmt: skip
    config = transformers.MaskFormerConfig(
        backbone_config=_resnet(), decoder_config=decoder, fpn_feature_size=32, mask_feature_size=32,
        num_labels=CLASSES,
    )  # fmt: skip
    model = _without_scipy("maskformer", lambda: transformers.MaskFormerForInstanceSegmentation(config))
    return Judged(model, masks_and_classes), _masks(64, 4)


@composed
def dinov3_vit() -> tuple[nn.Module, Feed]:
    """A backbone, with a linear classifier over its pooled output."""
    import transformers

    config = transformers.DINOv3ViTConfig(**{**SEE, "patch_size": 4}, num_register_tokens=2)

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.head = transformers.DINOv3ViTModel(config), nn.Linear(32, CLASSES)

        def forward(self, image: Tensor) -> Tensor:
            return self.head(self.backbone(image).pooler_output)

    return Judged(Pooled(), F.cross_entropy), lambda g: ((pictures(g), numbers(g, ROWS, low=0, high=CLASSES)), {})


# --- pictures and text -----------------------------------------------------------------------------------------------

PICTURE = VOCAB - 1


@composed
def llava() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SEE, projection_dim=16),
        text_config=transformers.LlamaConfig(**TEXT), image_token_index=PICTURE, image_seq_length=4,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config), with_picture(PICTURE, 4)


@composed
def vipllava() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.VipLlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SEE, projection_dim=16),
        text_config=transformers.LlamaConfig(**TEXT), image_token_index=PICTURE, image_seq_length=4,
        vision_feature_layers=[-1, -2],
    )  # fmt: skip
    return transformers.VipLlavaForConditionalGeneration(config), with_picture(PICTURE, 4)


@composed
def paligemma() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**SEE, projection_dim=32, vision_use_head=False),
        text_config=transformers.GemmaConfig(**TEXT, head_dim=8), image_token_index=PICTURE, projection_dim=32,
        hidden_size=32, vocab_size=VOCAB,
    )  # fmt: skip
    feed = with_picture(PICTURE, 4)

    def with_types(g: torch.Generator) -> Batch:
        args, kwargs = feed(g)
        return args, {**kwargs, "token_type_ids": (torch.arange(SEQ) >= 9).long().repeat(ROWS, 1)}

    return transformers.PaliGemmaForConditionalGeneration(config), with_types


@composed
def blip2() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.Blip2Config(
        vision_config=transformers.Blip2VisionConfig(**SEE, initializer_range=0.02).to_dict(),
        qformer_config=transformers.Blip2QFormerConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            encoder_hidden_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ).to_dict(),
        text_config=transformers.OPTConfig(
            **{k: v for k, v in TEXT.items() if k not in ("intermediate_size", "num_key_value_heads")},
            ffn_dim=48, word_embed_proj_dim=32, dropout=0.0,
        ).to_dict(),
        num_query_tokens=4, image_token_index=PICTURE,
    )  # fmt: skip
    return transformers.Blip2ForConditionalGeneration(config), with_picture(PICTURE, 4)


@composed
def qwen2_vl() -> tuple[nn.Module, Feed]:
    """One picture per row, as the patches that the processor makes of it: 4 x 4 of them, merged to 2 x 2."""
    import transformers

    config = transformers.Qwen2VLConfig(
        text_config=dict(TEXT, rope_parameters=dict(rope_type="default", mrope_section=[1, 1, 2], rope_theta=1e4)),
        vision_config=dict(depth=2, embed_dim=32, hidden_size=32, num_heads=4, mlp_ratio=2, patch_size=4),
        image_token_id=PICTURE, video_token_id=VOCAB - 2, vision_start_token_id=VOCAB - 3,
        vision_end_token_id=VOCAB - 4,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        ids = numbers(g, high=VOCAB - 4)
        labels = ids.clone()
        ids[:, 1], ids[:, 2:6] = VOCAB - 3, PICTURE
        labels[:, 1:6] = -100
        patches = torch.randn(ROWS * 16, 3 * 2 * 4 * 4, generator=g)
        return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": patches,
                    "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
                    "mm_token_type_ids": (ids == PICTURE).int()}  # fmt: skip

    return transformers.Qwen2VLForConditionalGeneration(config), feed


@composed
def vilt() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.ViltConfig(
        **{**SEE, "patch_size": 4}, vocab_size=VOCAB, num_labels=CLASSES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, max_position_embeddings=SEQ, max_image_length=-1,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return (), {"input_ids": numbers(g), "pixel_values": pictures(g),
                    "labels": torch.rand(ROWS, CLASSES, generator=g)}  # fmt: skip

    return transformers.ViltForQuestionAnswering(config), feed


@composed
def git() -> tuple[nn.Module, Feed]:
    import transformers

    vision = transformers.models.git.GitVisionConfig(**SEE)
    text = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
    config = transformers.GitConfig(
        vision_config=vision.to_dict(), **text, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.GitForCausalLM(config), with_picture(5, 0)


# --- speech ----------------------------------------------------------------------------------------------------------


@composed
def speecht5() -> tuple[nn.Module, Feed]:
    """Speech to text."""
    import transformers

    config = transformers.SpeechT5Config(
        vocab_size=VOCAB, hidden_size=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layerdrop=0.0, decoder_layerdrop=0.0,
        positional_dropout=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, conv_dim=(16, 16),
        conv_kernel=(4, 3), conv_stride=(4, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=4, apply_spec_augment=False, mask_time_prob=0.0, use_cache=False,
        max_speech_positions=64, max_text_positions=64, encoder_max_relative_position=8,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return (), {"input_values": torch.randn(ROWS, 256, generator=g), "labels": numbers(g)}

    return transformers.SpeechT5ForSpeechToText(config), feed


def _transcribed(kind: str) -> tuple[nn.Module, Feed]:
    """A model of the wav2vec2 kind with the CTC loss of transcripts of several lengths."""
    import transformers

    config = getattr(transformers, kind + "Config")(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16, 16), conv_kernel=(4, 3), conv_stride=(4, 2), num_feat_extract_layers=2, feat_proj_dropout=0.0,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=4, apply_spec_augment=False, final_dropout=0.0,
        mask_time_prob=0.0, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, layerdrop=0.0,
        pad_token_id=0, ctc_loss_reduction="mean",
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        labels = numbers(g, ROWS, 6)
        there = torch.arange(6) < torch.randint(3, 7, (ROWS, 1), generator=g)
        return (), {"input_values": torch.randn(ROWS, 256, generator=g), "labels": labels.where(there, -100)}

    return getattr(transformers, kind + "ForCTC")(config), feed


@composed
def wav2vec2_ctc() -> tuple[nn.Module, Feed]:
    return _transcribed("Wav2Vec2")


@composed
def hubert_ctc() -> tuple[nn.Module, Feed]:
    return _transcribed("Hubert")


@composed
def audio_spectrogram_transformer() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.ASTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, patch_size=4,
        frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8, num_labels=CLASSES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return (), {"input_values": torch.randn(ROWS, 16, 8, generator=g),
                    "labels": numbers(g, ROWS, low=0, high=CLASSES)}  # fmt: skip

    return transformers.ASTForAudioClassification(config), feed


@composed
def speech_to_text() -> tuple[nn.Module, Feed]:
    import transformers

    config = transformers.Speech2TextConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, dropout=0.0, encoder_layerdrop=0.0,
        decoder_layerdrop=0.0, max_source_positions=64, max_target_positions=64, conv_channels=16,
        input_feat_per_channel=8, use_cache=False, decoder_start_token_id=2,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return (), {"input_features": torch.randn(ROWS, 32, 8, generator=g), "labels": numbers(g)}

    return transformers.Speech2TextForConditionalGeneration(config), feed


# --- time series, and hybrids ----------------------------------------------------------------------------------------


def _forecaster(kind: str, **own: Any) -> tuple[nn.Module, Feed]:
    import transformers

    config = getattr(transformers, kind + "Config")(
        prediction_length=4, context_length=8, lags_sequence=[1, 2], num_time_features=2, d_model=16, dropout=0.0,
        encoder_layerdrop=0.0, decoder_layerdrop=0.0, attention_dropout=0.0, activation_dropout=0.0, use_cache=False,
        **own,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        past = 8 + 2
        return (), {
            "past_values": torch.rand(ROWS, past, generator=g), "future_values": torch.rand(ROWS, 4, generator=g),
            "past_time_features": torch.randn(ROWS, past, 2, generator=g),
            "future_time_features": torch.randn(ROWS, 4, 2, generator=g),
            "past_observed_mask": (torch.rand(ROWS, past, generator=g) < 0.9).float(),
        }  # fmt: skip

    return getattr(transformers, kind + "ForPrediction")(config), feed


@composed
def informer() -> tuple[nn.Module, Feed]:
    """Its attention draws the keys by which queries are picked; here all are drawn (a large factor)."""
    return _forecaster("Informer", sampling_factor=5)


@composed
def autoformer() -> tuple[nn.Module, Feed]:
    return _forecaster("Autoformer", label_length=2, moving_average=3)


@composed
def time_series_transformer() -> tuple[nn.Module, Feed]:
    return _forecaster("TimeSeriesTransformer")


def _patches(kind: str, **own: Any) -> tuple[nn.Module, Feed]:
    import transformers

    config = getattr(transformers, kind + "Config")(
        num_input_channels=3, context_length=16, patch_length=4, prediction_length=4, d_model=16, num_hidden_layers=2,
        dropout=0.0, head_dropout=0.0, loss="mse", **own,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        return (), {"past_values": torch.randn(ROWS, 16, 3, generator=g),
                    "future_values": torch.randn(ROWS, 4, 3, generator=g)}  # fmt: skip

    return getattr(transformers, kind + "ForPrediction")(config), feed


@composed
def patchtst() -> tuple[nn.Module, Feed]:
    return _patches(
        "PatchTST", patch_stride=4, num_attention_heads=4, ffn_dim=32, attention_dropout=0.0, positional_dropout=0.0,
        ff_dropout=0.0,
    )  # fmt: skip


@composed
def patchtsmixer() -> tuple[nn.Module, Feed]:
    return _patches("PatchTSMixer", patch_stride=4)


@composed
def zamba() -> tuple[nn.Module, Feed]:
    """State space layers, and one attention block with shared weights between two of them."""
    import transformers

    config = transformers.ZambaConfig(
        **{k: v for k, v in TEXT.items() if k != "num_hidden_layers"}, num_hidden_layers=6, attn_layer_period=3,
        attn_layer_offset=2, mamba_d_state=4, n_mamba_heads=2, use_mamba_kernels=False, attention_head_dim=16,
    )  # fmt: skip

    def feed(g: torch.Generator) -> Batch:
        ids = numbers(g)
        return (), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": numbers(g)}

    return transformers.ZambaForCausalLM(config), feed


__all__ = ["COMPOSED"]
