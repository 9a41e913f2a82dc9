"""What one rank does in the tests of other libraries' training loops, beside the same loop on the model itself."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from procs.habits import difference
from torch.utils.data import DataLoader, Dataset

from autopar.integrations import Accelerator, Trainer
from autopar.integrations.one_process import as_one_process
from autopar.integrations.trainer import arguments_of_one_process

CUTS = {"constraints": {"*": {"ranks": "n"}}}


class Lines(Dataset):
    """Rows of tokens of several lengths, as a tokenizer gives them."""

    def __init__(self, count: int, equal: bool = False) -> None:
        drawn = torch.Generator().manual_seed(count)
        lengths = [8 if equal else int(n) for n in torch.randint(5, 9, (count,), generator=drawn)]
        self.rows = [torch.randint(1, 30, (n,), generator=drawn) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[i], "labels": self.rows[i], "attention_mask": torch.ones_like(self.rows[i])}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As a collator pads: to the longest row, labels with -100."""
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    pad = torch.nn.utils.rnn.pad_sequence
    return {key: pad([row[key] for row in rows], True, value) for key, value in fill.items()}


def small(dropout: float = 0.0) -> Any:
    """GPT-2 of two blocks; its head is tied to the embedding."""
    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        attn_implementation="sdpa",
        bos_token_id=1,
        eos_token_id=2,
        **rates,
    )
    return transformers.GPT2LMHeadModel(config).double()


class Average(transformers.TrainerCallback):
    """An average of the weights that each step of the optimizer moves, from what callbacks get as the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.average = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, p in model.named_parameters():
            if name in self.average:
                self.average[name].lerp_(p.detach(), 0.5)


def mesh() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))


def arguments(folder: Path, **more: Any) -> Any:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3, "num_train_epochs": 2,
        "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "epoch",
        "save_strategy": "epoch", "report_to": [], "max_grad_norm": 0.5, "use_cpu": True, "disable_tqdm": True,
        "lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "seed": 3,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**options, **more})


def curve(trainer: Any) -> list[float]:
    """What a trainer has logged of losses and norms."""
    return [v for row in trainer.state.log_history for k, v in row.items() if k in ("loss", "eval_loss", "grad_norm")]


def trainer(folder: str, adapt: bool = False) -> dict[str, float]:
    """transformers' Trainer: accumulation, clipping, evaluation, last batches, lengths, checkpoints, resuming.

    Args:
        adapt: with peft's LoRA; the best adapters are loaded at the end.
    """
    place, worst = Path(folder) / str(adapt), {}
    data = {"train_dataset": Lines(22), "eval_dataset": Lines(7), "data_collator": padded}

    def model() -> Any:
        if not adapt:
            return small()
        import peft

        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(small(), config)

    best = {"load_best_model_at_end": True} if adapt else {}
    args = arguments(place / "two", **best)
    averages: list[Any] = [Average(), Average()]
    seen = averages[:1]
    mine = Trainer(model=(trained := model()), args=args, parallel={"mesh": mesh(), **CUTS}, callbacks=seen, **data)
    mine.train()
    mine.create_model_card()  # the first rank alone writes it
    alone = place / f"one{dist.get_rank()}"
    args = arguments(alone, **best)
    arguments_of_one_process(args)  # for transformers' own
    plain = transformers.Trainer(model=(expected := model()), args=args, callbacks=averages[1:], **data)
    plain.train()
    ours, theirs = curve(mine), curve(plain)
    assert len(ours) == len(theirs) > 6
    worst["losses"] = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    state = trained.state_dict()
    worst["weights"] = max(difference(state[key], value) for key, value in expected.state_dict().items())
    kept, wanted = (callback.average for callback in averages)
    worst["an average of a callback"] = max(difference(kept[key], value) for key, value in wanted.items())
    worst["evaluation"] = abs(mine.evaluate()["eval_loss"] / plain.evaluate()["eval_loss"] - 1)
    predicted, wanted = (t.predict(Lines(5, equal=True)).predictions for t in (mine, plain))
    worst["predictions"] = difference(torch.as_tensor(predicted), torch.as_tensor(wanted))
    # the run of two ranks goes on from the file of one, and one process from that of two
    first = "checkpoint-3"
    for source, kind in ((f"{place}/one0", Trainer), (f"{place}/two", transformers.Trainer)):
        dist.barrier()
        options = {"parallel": {"mesh": mesh(), **CUTS}} if kind is Trainer else {}
        again_args = arguments(place / f"again{dist.get_rank()}", save_strategy="no")
        arguments_of_one_process(again_args)
        again = kind(model=(resumed := model()), args=again_args, **data, **options)
        again.train(resume_from_checkpoint=f"{source}/{first}")
        state = resumed.state_dict()
        far = max(difference(state[key], value) for key, value in expected.state_dict().items())
        worst[f"resumed by {kind.__module__.partition('.')[0]}"] = far
    return worst


def accelerated(folder: str, equal: bool = True) -> dict[str, float]:
    """accelerate's loop, as its examples have it, with a checkpoint in the middle."""
    worst: dict[str, float] = {}
    results = []
    for kind in ("ours", "plain"):
        if kind == "ours":
            accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=2, parallel={"mesh": mesh(), **CUTS})
        else:
            import accelerate

            as_one_process(cpu=True)
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model: Any = small()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(4)
        loader: Any = DataLoader(Lines(10, equal), 4, shuffle=True, collate_fn=padded)
        schedule: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 0.3, total_iters=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        losses = []
        place = str(Path(folder) / f"{kind}{dist.get_rank() if kind == 'plain' else ''}")
        for epoch in range(3):
            model.train()
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                losses.append(accelerator.gather_for_metrics(loss.detach()))
            model.eval()
            with torch.no_grad():
                losses.append(model(**padded([Lines(4, equal)[i] for i in range(4)])).loss)
            if epoch == 0:
                accelerator.save_state(place) if kind == "ours" else None
        results.append(losses)
        state = accelerator.get_state_dict(model)
        results.append(copy.deepcopy(state))
        if kind == "ours":
            accelerator.load_state(place)
            resumed = _resumed(accelerator, model, optimizer, schedule, place)
            worst["resumed before the first call"] = resumed
            whole = accelerator.unwrap_model(model)
            dist.barrier()
            whole.save_pretrained(
                str(Path(folder) / "saved"),
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=state,
            )
            accelerator.wait_for_everyone()
            dist.barrier()
            loaded = transformers.GPT2LMHeadModel.from_pretrained(str(Path(folder) / "saved"))
            worst["saved"] = max(difference(v, results[1][k]) for k, v in loaded.state_dict().items())
    worst["losses"] = max(difference(a, b) for a, b in zip(results[0], results[2], strict=True))
    worst["weights"] = max(difference(results[1][key], value) for key, value in results[3].items())
    return worst


def _resumed(accelerator: Any, model: Any, optimizer: Any, schedule: Any, place: str) -> float:
    """A step of the run that was loaded, and of a new one that loads before its first call."""
    other: Any = Accelerator(cpu=True, parallel={"mesh": mesh(), **CUTS})
    again: Any = small()
    second: Any = torch.optim.AdamW(again.parameters(), lr=1e-2)
    later: Any = torch.optim.lr_scheduler.LinearLR(second, 0.3, total_iters=4)
    again, second, later = other.prepare(again, second, later)
    other.load_state(place)
    losses = []
    for one, its, rates in ((model, optimizer, schedule), (again, second, later)):
        one.train()
        for _ in range(2):
            loss = one(**padded([Lines(4, True)[i] for i in range(4)])).loss
            loss.backward()
            its.optimizer.step()
            its.optimizer.zero_grad()
            rates.scheduler.step()
        losses.append(loss.detach())
    return difference(losses[1], losses[0])
