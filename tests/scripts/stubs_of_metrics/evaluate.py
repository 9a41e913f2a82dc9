"""Stands for evaluate, which loads metrics from the network: accuracy."""

from __future__ import annotations

from typing import Any

import numpy as np


class _Accuracy:
    def compute(self, *, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}


def load(name: str, **_: Any) -> _Accuracy:
    assert name == "accuracy", name
    return _Accuracy()
