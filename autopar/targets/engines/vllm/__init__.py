"""vLLM 0.33: a config that ``vllm serve --config`` reads, and the script that starts it.

=============== =======================================================================================================
:mod:`.writing` the options of a worker, what vLLM refuses of them, and the files
=============== =======================================================================================================
"""

from __future__ import annotations

from autopar.targets.engines.serving_engine import ServingEngine
from autopar.targets.engines.vllm.writing import NAME, TITLE, refuses, settings, write

ENGINE = ServingEngine(name=NAME, title=TITLE, settings=settings, refuses=refuses, write=write)
