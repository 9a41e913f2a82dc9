"""TensorRT-LLM 1.3: options of its LLM API as YAML, which ``trtllm-serve --config`` reads.

=============== =======================================================================================================
:mod:`.writing` the options of a worker, what TensorRT-LLM refuses of them, and the files
=============== =======================================================================================================
"""

from __future__ import annotations

from autopar.targets.engines.serving_engine import ServingEngine
from autopar.targets.engines.tensorrt_llm.writing import NAME, TITLE, refuses, settings, write

ENGINE = ServingEngine(name=NAME, title=TITLE, settings=settings, refuses=refuses, write=write)
