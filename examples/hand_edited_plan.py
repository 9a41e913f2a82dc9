"""A plan is a file: write it, read it, change a line, run it. ``python examples/hand_edited_plan.py``

The planner is asked for a plan of a small MLP on two ranks; then its ops are replaced by three lines in the way of
Megatron: the first layer cut by output features, the second by input features. Loading finds the placements of the
parameters and the collectives that this needs, and its price.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import planfile


def model_and_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, torch.randn(16, 64), torch.randn(16, 64)


def main(path: str) -> tuple[float, float, str]:
    model, x, y = model_and_batch()
    pm = autopar.parallelize(model, 2, x, loss_fn=F.mse_loss, targets=y, plan=path)
    loss = pm(x, y)
    loss.backward()
    gradient = pm.get_parameter("0.weight").grad
    return loss.item(), gradient.full_tensor().norm().item(), pm.program.code


if __name__ == "__main__":
    model, x, y = model_and_batch()
    captured = autopar.capture(model, x, loss_fn=F.mse_loss, targets=y)
    plan = autopar.plan(model, "local-x2", x, mesh="tensor=2", captured=captured)
    document = json.loads(planfile.dumps(plan, captured.graph))
    stage = document["stages"][0]
    print("as planned:   ", json.dumps(stage["ops"]), f"{plan.price.seconds * 1e6:.0f} us")
    stage["ops"] = {
        "0:linear": {"tensor": "n"},
        "1:gelu": {"tensor": "s"},
        "2:linear": {"tensor": "k"},
    }
    stage["params"] = {
        "0.*": {"stored": "S0", "used": "S0"},
        "2.weight": {"stored": "S1", "used": "S1"},
        "2.bias": {"stored": "I", "used": "I"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(document, indent=2))
        edited = planfile.load(path, captured.graph)
        print("edited by hand:", json.dumps(stage["ops"]), f"{edited.price.seconds * 1e6:.0f} us")
        (loss, norm, code), _ = autopar.run_local(main, 2, str(path))
    print(code)
    whole = F.mse_loss(model(x), y)
    whole.backward()
    wanted = model[0].weight.grad.norm().item()
    print(f"loss {loss:.6f}, one device {whole.item():.6f}; gradient {norm:.6f}, one device {wanted:.6f}")
    assert abs(loss - whole.item()) < 1e-6 and abs(norm - wanted) < 1e-6
