"""What a step program keeps of what scripts do with a model: each case says what came out.

``python benchmarks/step_program/semantics.py``: one line of JSON a case, ``equal`` against the executor of today.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
import generating
from measure import loss_of, made
from models import MODELS, of_zoo
from running import Program, Runs

import autopar


def pair(name: str, **options: Any) -> tuple[Any, Any, Callable[[bool], None], tuple[Any, ...], dict[str, Any]]:
    """Return a parallel module, its step programs, a switch between them and today's executor, and a batch."""
    model, args, kwargs = made(name)
    pm = autopar.parallelize(model, 1, kwargs or args, **options)
    runs, run = Runs(pm), pm._autopar
    today = type(run).call_program.__get__(run)

    def switch(is_on: bool) -> None:
        run.call_program = runs.call_program if is_on else today
        for p in pm.parameters():
            p.grad = None

    return pm, runs, switch, args, kwargs


def both(name: str, script: Callable[..., Any], **options: Any) -> str:
    """Run a script on both; return whether gradients and what it returns are equal."""
    pm, _, switch, args, kwargs = pair(name, **options)
    results = []
    for is_on in (False, True):
        switch(is_on)
        torch.manual_seed(5)
        try:
            extra = script(pm, args, kwargs)
        except Exception as error:
            results.append(f"{type(error).__name__}: {str(error)[:160]}")
            continue
        results.append((extra, {k: None if p.grad is None else p.grad.clone() for k, p in pm.named_parameters()}))
    if any(isinstance(r, str) for r in results):
        shown = [r if isinstance(r, str) else "ran" for r in results]
        return f"today: {shown[0]}; program: {shown[1]}"
    (a, ga), (b, gb) = results
    same = all((ga[k] is None) == (gb[k] is None) and (ga[k] is None or torch.equal(ga[k], gb[k])) for k in ga)
    extra_same = (a is None and b is None) or (a is not None and b is not None and bool(torch.equal(a, b)))
    return "equal" if same and extra_same else f"gradients equal: {same}, results equal: {extra_same}"


def retained(pm: Any, args: Any, kwargs: Any) -> None:
    loss = loss_of(pm(*args, **kwargs))
    loss.backward(retain_graph=True)
    loss.backward()


def twice(pm: Any, args: Any, kwargs: Any) -> None:
    loss = loss_of(pm(*args, **kwargs))
    loss.backward()
    loss.backward()


def accumulated(pm: Any, args: Any, kwargs: Any) -> None:
    for _ in range(3):
        loss_of(pm(*args, **kwargs)).backward()


def scaled(pm: Any, args: Any, kwargs: Any) -> None:
    (loss_of(pm(*args, **kwargs)) * 3 + loss_of(pm(*args, **kwargs))).backward()


def of_inputs(pm: Any, args: Any, kwargs: Any) -> torch.Tensor:
    x = args[0].clone().requires_grad_()
    loss_of(pm(x, *args[1:], **kwargs)).backward()
    return x.grad


def frozen(pm: Any, args: Any, kwargs: Any) -> None:
    first = next(iter(pm.parameters()))
    first.requires_grad_(False)
    try:
        loss_of(pm(*args, **kwargs)).backward()
    finally:
        first.requires_grad_(True)


def hooked(pm: Any, args: Any, kwargs: Any) -> None:
    handles = [p.register_hook(lambda g: g * 2) for p in pm.parameters()]
    loss_of(pm(*args, **kwargs)).backward()
    for handle in handles:
        handle.remove()


def penalty(pm: Any, args: Any, kwargs: Any) -> None:
    x = args[0].clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(pm(x, *args[1:], **kwargs)), x, create_graph=True)
    (grad**2).sum().backward()


def on_cpu(pm: Any, args: Any, kwargs: Any) -> torch.Tensor:
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x.numel()) or x, lambda x: x):
        loss_of(pm(*args, **kwargs)).backward()
    return torch.tensor(len(seen))


def anomaly(pm: Any, args: Any, kwargs: Any) -> None:
    with torch.autograd.detect_anomaly(check_nan=False):
        loss_of(pm(*args, **kwargs)).backward()


def one_output(pm: Any, args: Any, kwargs: Any) -> None:
    pm(*args, **kwargs)["logits"].square().mean().backward()


def without_gradients(pm: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(pm(*args, **kwargs))


def compiled(name: str, backend: str) -> str:
    """Compile the generated functions."""
    pm, runs, switch, args, kwargs = pair(name)
    switch(False)
    loss_of(pm(*args, **kwargs)).backward()
    before = [p.grad.clone() for p in pm.parameters()]
    switch(True)
    generating.PLAIN = True
    generating._bound.clear()
    program = runs.program([])
    functions = program.functions = generating.Functions(program.step)
    generating.PLAIN = False
    generating._bound.clear()
    began = time.thread_time()
    for which in ("forward", "backward"):
        plain = getattr(functions, which)
        inner = torch.compile(lambda *x, f=plain: f(list(x)), backend=backend, fullgraph=True)
        setattr(functions, which, lambda x, f=inner: f(*x))
    loss_of(pm(*args, **kwargs)).backward()
    worst = max(float((a - p.grad).abs().max()) for a, p in zip(before, pm.parameters(), strict=True))
    return f"one graph each, largest difference {worst:.2e}, {time.thread_time() - began:.1f} CPU s"


def recomputed(name: str) -> str:
    """Run everything but what begins a block again in the backward."""
    pm, runs, switch, args, kwargs = pair(name)
    stage = pm._autopar.stage
    switch(False)
    torch.manual_seed(5)
    loss_of(pm(*args, **kwargs)).backward()
    before = [p.grad.clone() for p in pm.parameters()]
    switch(True)
    graph = stage.program.module.graph
    names = [n.name for n in graph.nodes if n.op == "call_function"]
    keep = set(names[len(names) // 3 :: len(names) // 3])
    program = Program(stage, [stage.graph.loss], [], recomputed=[n for n in names if n not in keep])
    runs.programs[()] = program
    torch.manual_seed(5)
    loss_of(pm(*args, **kwargs)).backward()
    same = all(torch.equal(a, p.grad) for a, p in zip(before, pm.parameters(), strict=True))
    return f"equal: {same}; saved {len(program.functions.saved)} values"


CASES: dict[str, Callable[[], str]] = {
    "retain_graph": lambda: both("function", retained),
    "second backward without it": lambda: both("function", twice),
    "accumulation": lambda: both("function", accumulated),
    "two calls in one loss, scaled": lambda: both("hooks", scaled),
    "gradients of inputs": lambda: both("hooks", of_inputs),
    "frozen after parallelize": lambda: both("hooks", frozen),
    "hooks of parameters": lambda: both("hooks", hooked),
    "double backward": lambda: both("hooks", penalty),
    "saved_tensors_hooks around a call": lambda: both("gpt2", on_cpu),
    "anomaly mode": lambda: both("function", anomaly),
    "no_grad": lambda: both("hooks", without_gradients),
    "backward of another output": lambda: both("gpt2", one_output),
    "dropout, recomputed": lambda: recomputed("gpt2_dropout"),
    "torch.compile, aot_eager": lambda: compiled("gpt2", "aot_eager"),
}


def main() -> None:
    """Try all cases, or those that are named."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    MODELS["gpt2_dropout"] = of_zoo("gpt2", dropout=0.1)
    for case in sys.argv[1:] or CASES:
        try:
            print(json.dumps({"case": case, "is": CASES[case]()}), flush=True)
        except Exception as error:
            print(json.dumps({"case": case, "is": f"{type(error).__name__}: {str(error)[-400:]}"}), flush=True)


if __name__ == "__main__":
    main()
