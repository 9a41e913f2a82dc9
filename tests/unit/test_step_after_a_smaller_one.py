"""A full batch after a smaller one is a step of the program that it was captured with, in as many microbatches."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional

import autopar


def test_batch_statistics_are_those_of_one_process() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    plain = copy.deepcopy(model)
    labels = [torch.zeros(16, dtype=torch.long)]
    pm = autopar.parallelize(model, 1, torch.randn(16, 4), loss_fn=functional.cross_entropy, targets=labels)
    for rows in (16, 4, 16, 8, 16):
        x, y = torch.randn(rows, 4), torch.randint(0, 3, (rows,))
        loss = pm.train_step(x, y)
        wanted = functional.cross_entropy(plain(x), y)
        assert float(loss.detach()) == float(wanted.detach()), rows
    wanted_buffers = dict(plain.named_buffers())
    assert all(torch.equal(value, wanted_buffers[name]) for name, value in pm.named_buffers())
