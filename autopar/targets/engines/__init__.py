"""Engines that serve models, a folder each, which defines ``ENGINE``, a :class:`.ServingEngine`.

The rest of autopar knows none of them by name. Their options and the values of these have their source beside them.

======================= ===============================================================================================
:mod:`.serving_engine`  the record of an engine, what it is given to write, and what no engine can serve
:mod:`.scripts`         the shell script that starts a worker, its head, and options as YAML
:mod:`.vllm`            vLLM 0.33
:mod:`.sglang`          SGLang 0.5.23
:mod:`.tensorrt_llm`    TensorRT-LLM 1.3
:mod:`.dynamo`          Dynamo 1.6 over one of these engines, on Kubernetes
======================= ===============================================================================================
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from autopar.errors import PlanError, closest
from autopar.targets.engines.serving_engine import ServingEngine

__all__ = ["engine_named", "engines"]


@cache
def engines() -> dict[str, ServingEngine]:
    """Return the records of all engines by name."""
    found: dict[str, ServingEngine] = {}
    for name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
        engine = getattr(importlib.import_module(f"{__name__}.{name}"), "ENGINE", None)
        if isinstance(engine, ServingEngine):
            found[engine.name] = engine
    return found


def engine_named(name: str) -> ServingEngine:
    """Return the record of an engine, or raise a PlanError with the known names."""
    known = engines()
    if name not in known:
        raise PlanError(f"no engine '{name}' is known to export a serving plan to; {closest(name, known)}")
    return known[name]
