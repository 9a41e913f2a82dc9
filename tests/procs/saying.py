"""What one rank does in the tests of what ``parallelize`` says."""

from __future__ import annotations

import contextlib
import io
import logging
from typing import Any

import torch
from procs.optimizer_cases import Flat, Small, inputs, spread_anew

import autopar


def said_by_parallelize() -> list[str]:
    """With a cut by hand, in a pipeline, and at another level."""
    logger, texts = logging.getLogger("autopar"), []
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    makers: list[Any] = [
        lambda: spread_anew(Small(), "ZeRO-3"),
        lambda: autopar.parallelize(Flat(), 2, inputs(1)[0], stages=2, microbatches=2),
        lambda: logger.setLevel(logging.WARNING) or spread_anew(Small(), "cut"),
    ]
    for make in makers:
        stream = io.StringIO()
        with contextlib.redirect_stderr(stream):
            for handler in logger.handlers:
                assert isinstance(handler, logging.StreamHandler)
                handler.setStream(stream)
            make()
        texts.append(stream.getvalue())
    torch.distributed.barrier()
    return texts
