"""Dynamo 1.6: a deployment on Kubernetes, of workers of the engine that a plan was priced for.

=============== =======================================================================================================
:mod:`.writing` the arguments of a worker, the deployment, and the script that applies it
=============== =======================================================================================================
"""

from __future__ import annotations

from autopar.targets.engines.dynamo.writing import NAME, TITLE, refuses, settings, write
from autopar.targets.engines.serving_engine import ServingEngine

ENGINE = ServingEngine(name=NAME, title=TITLE, settings=settings, refuses=refuses, write=write)
