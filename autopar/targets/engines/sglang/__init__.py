"""SGLang 0.5.23: the command line of its server.

=============== =======================================================================================================
:mod:`.writing` the options of a worker, what SGLang refuses of them, and the script
=============== =======================================================================================================
"""

from __future__ import annotations

from autopar.targets.engines.serving_engine import ServingEngine
from autopar.targets.engines.sglang.writing import NAME, TITLE, refuses, settings, write

ENGINE = ServingEngine(name=NAME, title=TITLE, settings=settings, refuses=refuses, write=write)
