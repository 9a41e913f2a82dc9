"""AlexNet on two GTX 580: the split of 2012 beside what the planner chooses. ``python examples/plan_alexnet.py``

Krizhevsky, Sutskever and Hinton put half of the feature maps on each card: convolutions 2, 4 and 5 read the maps of
their own card only (the model has two groups there), the third and the linear layers read both. Local response
normalisation is left out here.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.plans.plan import Plan

CLUSTER = Path(__file__).parent / "clusters" / "gtx580-x2.toml"
LAYERS = ("conv1", "conv2", "conv3", "conv4", "conv5", "fc6", "fc7", "fc8")
MAPS = {"tensor": "o"}  # a card makes half of the maps, out of all those below
GROUP = {"tensor": "g"}  # a card makes its own maps out of its own maps
COLUMNS = {"tensor": "n"}
SPLIT_2012 = dict(zip(LAYERS, (MAPS, GROUP, MAPS, GROUP, GROUP, COLUMNS, COLUMNS), strict=False))
DATA = {"*": {"tensor": "b"}}


class AlexNet(nn.Module):
    """The layers of the paper."""

    def __init__(self, groups: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 96, 11, 4, 2), nn.Conv2d(96, 256, 5, 1, 2, groups=groups)
        self.conv3, self.conv4 = nn.Conv2d(256, 384, 3, 1, 1), nn.Conv2d(384, 384, 3, 1, 1, groups=groups)
        self.conv5 = nn.Conv2d(384, 256, 3, 1, 1, groups=groups)
        self.fc6, self.fc7, self.fc8 = nn.Linear(9216, 4096), nn.Linear(4096, 4096), nn.Linear(4096, 1000)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b 3 224 224] -> [b 1000]
        x = F.max_pool2d(self.conv1(x).relu(), 3, 2)
        x = F.max_pool2d(self.conv2(x).relu(), 3, 2)
        x = F.max_pool2d(self.conv5(self.conv4(self.conv3(x).relu()).relu()).relu(), 3, 2)
        for layer in (self.fc6, self.fc7):
            x = layer(F.dropout(x.flatten(1), self.dropout)).relu()
        return self.fc8(x)


def inputs(batch: int, device: str = "meta") -> tuple[torch.Tensor, torch.Tensor]:
    generator = None if device == "meta" else torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, 224, 224, device=device, generator=generator)
    return images, torch.randint(0, 1000, (batch,), device=device, generator=generator)


def planned(batch: int, groups: int = 2, **plan_options: object) -> Plan:
    with torch.device("meta"):
        model = AlexNet(groups)
    images, classes = inputs(batch)
    return autopar.plan(
        model, CLUSTER, images, loss_fn=F.cross_entropy, targets=classes, mesh="tensor=2", optimizer="sgd_momentum",
        **plan_options,
    )  # type: ignore[arg-type,return-value]  # fmt: skip


def layout(plan: Plan) -> str:
    """``conv1-2 batch, fc6 rows``: what is cut of each layer, told from where its weight is."""

    def cut(layer: str) -> str:
        state = plan.params[f"{layer}.weight"].used[0]
        return {"S0": "maps" if layer.startswith("conv") else "columns", "S1": "rows"}.get(str(state), "batch")

    found = []
    for what, run in groupby(LAYERS, key=cut):
        names = list(run)
        found.append(f"{names[0]}{f'-{names[-1][-1]}' if len(names) > 1 else ''} {what}")
    return ", ".join(found)


def show(title: str, plan: Plan) -> float:
    price = plan.price
    print(
        f"{title:34}{price.seconds * 1e3:7.1f} ms = {price.compute_seconds * 1e3:5.1f} compute"
        f" + {price.activation_seconds * 1e3:3.1f} activations + {price.parameter_seconds * 1e3:4.1f} gradients,"
        f" {price.memory_bytes / 1e9:.2f} GB\n{'':34}{layout(plan)}"
    )
    return price.seconds


def train(cut: bool) -> list[float]:
    """Two steps on the CPU, on two ranks with the split of 2012 or on one device."""
    torch.manual_seed(0)
    model, (images, classes) = AlexNet(2, dropout=0.0), inputs(2, "cpu")
    if cut:
        ranks = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
        model = autopar.parallelize(
            model, ranks, images, loss_fn=F.cross_entropy, targets=classes, constraints=SPLIT_2012, optimizer="sgd"
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(2):
        loss = model(images, classes) if cut else F.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print("The net of 2012, two groups in convolutions 2, 4 and 5; a step of 128 pictures:")
    of_2012 = show("  the split of 2012", planned(128, constraints=SPLIT_2012))
    parallel = show("  data parallel throughout", planned(128, constraints=DATA))
    chosen = planned(128)
    best = show("  the planner's choice", chosen)
    assert best <= of_2012 < parallel
    assert layout(chosen).startswith("conv1-5 batch, fc6 ")
    slower, days = of_2012 / best - 1, 90 * 1.2e6 / 128 * of_2012 / 86400
    print(f"""
The planner cuts the linear layers over the cards, as in 2012, and the batch of the convolutions, as Krizhevsky did in
2014 (One weird trick for parallelizing convolutional neural networks). The split of 2012 is {slower:.1%} slower by this
account: it moves feature maps, which grow with the batch, where the other moves gradients of the convolutions, which
do not. Data parallelism moves the gradients of all 61 million parameters. Memory decides nothing here: by this account
the net fits on one card; the paper says that the 3 GB limited its size.

90 passes over 1.2 million pictures: {days:.1f} days by the split of 2012; the paper says five to six.
""")
    print("Smaller batches, the planner's choice:")
    small = {batch: planned(batch) for batch in (16, 32, 64)}
    for batch, plan in small.items():
        print(f"  {batch:3} pictures  {plan.price.seconds * 1e3:6.1f} ms  {layout(plan)}")
    assert layout(small[32]).startswith("conv1-5 maps, fc6 "), "the split of 2012"
    assert layout(small[64]).startswith("conv1-5 batch, fc6 ")
    dense = planned(32, groups=1)
    print(f"   32, no groups  {dense.price.seconds * 1e3:6.1f} ms  {layout(dense)}")
    assert layout(dense).startswith("conv1-5 batch")
    print("""
Up to about 50 pictures a step the split of 2012 is what the planner finds: all convolutions by maps, each group on its
card. It differs in the linear layers: rows and columns in turn need one exchange where columns throughout need two.
Without groups, which were made for the two cards, every convolution reads all maps, and its batch is cut instead.
""")
    first, second = autopar.run_local(train, 2, True)
    alone = train(False)
    print("losses of the split of 2012 on two local ranks", *(f"{x:.5f}" for x in first))
    print("                                 on one device", *(f"{x:.5f}" for x in alone))
    assert first == second, "ranks disagree"
    assert max(abs(a - b) for a, b in zip(first, alone, strict=True)) < 1e-4
