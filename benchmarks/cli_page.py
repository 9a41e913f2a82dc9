"""Makes the outputs in docs/cli.md anew, by running every ``$ autopar`` line of the page.

    python benchmarks/cli_page.py [PAGE]

The page's own ``gpt.py`` is used, and a Llama of 1.1 billion parameters as ``config.json``. Read the difference, and
the sentences around it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
}  # fmt: skip


def output(command: str, folder: Path) -> list[str]:
    """What a command prints, without trailing blanks; of a program its head and its first collectives."""
    words = shlex.split(command.replace("\\\n", " "))
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{command}\nended with exit code {done.returncode}:\n{done.stderr}")
    lines = [line.rstrip() for line in done.stdout.rstrip("\n").split("\n")]
    if "--code" in words:
        body = next(k for k, line in enumerate(lines) if line.startswith("):"))
        first = next(k for k in range(body, len(lines)) if "collectives." in lines[k])
        cut = "    ..."
        lines = [*lines[:9], cut, *lines[body - 3 : body + 5], cut, *lines[first - 3 : first + 8], cut]
    return lines


def block(text: str, folder: Path) -> str:
    """A block of commands with the outputs of today; only the last command's is shown."""
    commands = re.findall(r"^\$ (autopar(?:[^\n]*\\\n)*[^\n]*)$", text, re.MULTILINE)
    shown: list[str] = []
    for command in commands:
        shown = output(command, folder)
    return "\n".join([*(f"$ {command}" for command in commands), *shown]) + "\n"


def renewed(page: str, folder: Path) -> str:
    """The page with every output, and the plan file, made anew."""
    model = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert model is not None
    (folder / "gpt.py").write_text(model[1])
    (folder / "config.json").write_text(json.dumps(LLAMA))
    page = re.sub(r"(?<=```text\n)\$ autopar.*?(?=```)", lambda found: block(found[0], folder), page, flags=re.DOTALL)
    plan = (folder / "megatron.json").read_text()
    return re.sub(r"(?<=```json\n)\{.*?\n\}\n(?=```)", lambda _: plan, page, count=1, flags=re.DOTALL)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    with tempfile.TemporaryDirectory() as temporary:
        made = renewed(target.read_text(encoding="utf-8"), Path(temporary))
    target.write_text(made, encoding="utf-8")
