"""A model that is parallelized at its first call in training: what it is asked for is looked at before."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.errors import AutoparError
from autopar.integrations.first_call import ParallelOnFirstCall


def test_a_pipeline_is_refused_before_there_is_a_plan() -> None:
    with pytest.raises(AutoparError, match="train by train_step, and the library's loop calls the model"):
        ParallelOnFirstCall(nn.Linear(2, 2), options={"stages": 2})
