"""A model turned into a parallel module, as a plan says: on one mesh or in stages."""

from __future__ import annotations

from typing import Any

from autopar.runtime.as_module.parallel_module import parallel
from autopar.runtime.one_mesh.mesh_step import MeshRun
from autopar.runtime.pipelines.pipeline import PipelineRun


def on_mesh(*args: Any, **options: Any) -> Any:
    """Turn a model into a parallel module on one mesh; arguments as of :class:`MeshRun`."""
    return parallel(MeshRun(*args, **options))


def pipelined(*args: Any, **options: Any) -> Any:
    """Turn a model into a parallel module in stages; arguments as of :class:`PipelineRun`."""
    return parallel(PipelineRun(*args, **options))
