"""Libraries choose by class, name and signature: a parallel module answers as the model does."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import ParallelModule

X = torch.linspace(-1.0, 1.0, 12).reshape(3, 4)
registered: list[str] = []


class Registered(nn.Module):
    """A model whose class is told of its subclasses."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(4, width)

    def __init_subclass__(cls, **options: Any) -> None:
        registered.append(cls.__name__)

    def forward(self, pixels: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (self.linear(pixels) * scale).square().mean()


class Encoder(Registered):
    pass


@pytest.fixture(autouse=True)
def alone() -> Any:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_parallel_module_is_of_the_models_class() -> None:
    pm, other = autopar.parallelize(Encoder(), 1, X), autopar.parallelize(Registered(), 1, X)
    assert registered == ["Encoder"]
    assert isinstance(pm, Encoder) and isinstance(pm, Registered) and isinstance(pm, ParallelModule)
    assert type(pm).__name__ == pm.__class__.__name__ == pm._get_name() == "Encoder"
    assert isinstance(copy.deepcopy(pm), type(pm)) and isinstance(copy.deepcopy(pm), Encoder)
    assert not isinstance(other, type(pm)) and not isinstance(other, Encoder)  # as diffusers tells models apart
    assert not isinstance(pm, type(other))
    assert type(pm.__class__(8)) is Encoder
    assert [c.__name__ for c in inspect.getmro(pm.__class__)].count("Registered") == 1


def test_forward_has_the_models_signature() -> None:
    model = Encoder()
    pm = autopar.parallelize(model, 1, X)
    assert inspect.signature(pm.forward) == inspect.signature(model.forward)
    batch = {"pixels": X, "scale": 1.0, "name": "a column of the data set"}
    kept = {key: value for key, value in batch.items() if key in inspect.signature(pm.forward).parameters}
    pm(**kept).backward()
    assert pm.linear.weight.grad is not None


def test_states_are_as_they_were() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.linear(x)).square().mean()

    pm = autopar.parallelize(Drops(), 1, X)
    state = pm.state_dict()
    assert "_extra_state" in state
    pm(X)
    assert not pm.load_state_dict(state).missing_keys
    assert pm.state_dict().keys() == state.keys()


def _rows() -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [{"input_ids": row, "labels": row} for row in torch.randint(3, 32, (8, 10), generator=drawn)]


def _causal() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    ))  # fmt: skip


def _adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(_causal(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def _encoder_decoder() -> Any:
    import transformers

    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    ))  # fmt: skip


def _with_decoder_inputs(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    return {**batch, "decoder_input_ids": batch["labels"].roll(1, 1)}


def _trained(kind: Any, make: Any, folder: Path, **options: Any) -> Any:
    import transformers

    transformers.set_seed(0)
    args = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=8, max_steps=4, learning_rate=1e-2, logging_steps=1, report_to=[],
        save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, **options.pop("arguments", {}),
    )  # fmt: skip
    model = make()
    if model.config.is_encoder_decoder:
        options["data_collator"] = _with_decoder_inputs
    trainer = kind(model=model, args=args, train_dataset=_rows(), **options)
    trainer.train()
    return trainer


def _losses(trainer: Any) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize("make", [_causal, _adapted, _encoder_decoder])
def test_labels_are_smoothed_as_by_transformers(make: Any, tmp_path: Path) -> None:
    import transformers

    from autopar.integrations import Trainer

    smoothed = {"label_smoothing_factor": 0.1}
    expected = _losses(_trained(transformers.Trainer, make, tmp_path, arguments=dict(smoothed)))
    assert _losses(_trained(Trainer, make, tmp_path, arguments=dict(smoothed))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("make", [_causal, _adapted, _encoder_decoder])
def test_a_trainer_checkpoints_activations(make: Any, tmp_path: Path) -> None:
    import transformers

    from autopar.integrations import Trainer

    def checkpointed() -> dict[str, Any]:
        return {"gradient_checkpointing": True}

    expected = _losses(_trained(transformers.Trainer, make, tmp_path, arguments=checkpointed()))
    assert _losses(_trained(Trainer, make, tmp_path, arguments=checkpointed())) == pytest.approx(expected, rel=1e-5)


def test_callbacks_and_methods_of_a_trainer_see_what_is_trained(tmp_path: Path) -> None:
    import transformers

    from autopar.integrations import Trainer

    class Average(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            self.average = {name: p.detach().clone() for name, p in model.named_parameters()}

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            for name, p in model.named_parameters():
                self.average[name].lerp_(p.detach(), 0.5)

    class OfItsModel:
        def compute_loss(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return self.model(**inputs).loss

    averages, losses = [], []
    for kind in (transformers.Trainer, Trainer):
        average: Any = Average()
        own = type("Own", (OfItsModel, kind), {})
        losses.append(_losses(_trained(own, _causal, tmp_path, callbacks=[average])))
        averages.append(average.average)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for name, value in averages[0].items():
        torch.testing.assert_close(averages[1][name], value)
