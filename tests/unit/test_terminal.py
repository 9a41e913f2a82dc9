"""What a file, a model or an error says reaches the terminal as text: neither control characters nor markup."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from command_line import command

from autopar.cli.terminal import Terminal, styled

ROOT = Path(__file__).resolve().parents[2]
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({"[red]": torch.nn.Linear(8, 8), "[/bold]": torch.nn.Linear(8, 8)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()

def make():
    return Net(), (torch.ones(8, 8),)
"""


def shown(*what: object) -> str:
    file = io.StringIO()
    Terminal(file=file, markup=False, highlight=False, width=100).print(*what)
    return file.getvalue()


def test_styles_are_for_templates_alone() -> None:
    assert shown(styled("[bold]{}[/bold] of {}", "[red]a[/red]", "[/]\\[b")) == "[red]a[/red] of [/]\\[b\n"
    assert shown("[red]a[/red] \x1b[31m") == "[red]a[/red] \\x1b[31m\n"


def test_names_of_modules_and_files_are_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[green]odd").mkdir()
    model = "[green]odd/net[bold].py"
    Path(model).write_text(MODEL)
    plan = f"plan {model}:make --cluster local-x2 --mesh data=2 -o plan.json"
    seen = {
        f"inspect {model}:make": "layers.[red].weight", plan: "written to plan.json", "show plan.json": model,
        "show plan.json --all --trust": "layers.[/bold]", "explain plan.json *linear* --trust": "layers.[red]",
        plan.replace("make", "absent"): model,
    }  # fmt: skip
    for line, expected in seen.items():
        code, printed, said = command(*line.split())
        assert code == (2 if "absent" in line else 0), printed + said
        assert expected in printed + said


def test_texts_with_values_are_not_marked_up_by_hand() -> None:
    """A format string with a style in it would take what is filled in for markup too."""
    wrong = []
    for path in sorted((ROOT / "autopar").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "[/" in text else ():
            parts = node.values if isinstance(node, ast.JoinedStr) else ()
            texts = [p.value for p in parts if isinstance(p, ast.Constant) and isinstance(p.value, str)]
            if any("[/" in text for text in texts):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")  # type: ignore[attr-defined]
    assert not wrong, "use autopar.cli.terminal.styled"
