"""Plans that keep the optimizer on the host, as files of trainers: what the plan says is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import command

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512,
    "max_position_embeddings": 128, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("how", [("--for", "deepspeed"), ("--mesh", "data=8")])
def test_an_optimizer_on_the_host_is_in_the_files(tmp_path: Path, how: tuple[str, str]) -> None:
    """Of a layout of the trainer, and of the nearest layout to a plan of autopar's own."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    file, folder = tmp_path / "plan.json", tmp_path / "out"
    words = f"hf:{tmp_path / 'config.json'}", "--batch", 16, "--seq", 64, "-c", "dgx-h100", "--precision", "bf16-mixed"
    code, _, err = command("plan", *words, *how, "--offload", "optimizer=1", "-o", file)
    assert code == 0, err
    code, _, err = command("export", file, "--to", "deepspeed", "-o", folder)
    assert code == 0, err
    zero = json.loads((folder / "ds_config.json").read_text())["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "cpu"
    assert "export OMP_NUM_THREADS=14\n" in (folder / "launch.sh").read_text()
    if how[0] == "--mesh":
        code, out, err = command("launch", file)
        assert code == 0 and "OMP_NUM_THREADS=14" in out, err


def test_activations_on_the_host_are_not_said_to_trainers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = f"hf:{tmp_path / 'config.json'}", "--batch", 16, "--seq", 64, "-c", "dgx-h100", "--for", "deepspeed"
    code, _, err = command("plan", *words, "--offload", "auto")
    assert code == 2 and "--offload auto lets activations leave the device" in err
