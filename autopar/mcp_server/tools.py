"""The tools of the server: what an agent can ask, and the command that answers.

The docstrings are what agents read. Tools of commands that this autopar does not have are not offered.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from autopar.mcp_server.commands import CommandRunner

Answer = dict[str, Any]
Tool = Callable[..., Awaitable[Answer]]
KEPT_OF_PLANS = ("cluster", "optimizer", "seconds", "notes", "alternatives", "layouts", "trainer")
"""Keys of a plan's answer that an agent reads; every operator's decision is in the file."""


@dataclass(eq=False)
class AgentTools:
    """The tools, on one runner."""

    run: CommandRunner

    async def plan(
        self, model: str, cluster: str, output: str = "plan.json", batch: int | None = None, seq: int | None = None,
        top: int = 3, like: list[str] | None = None, trainer: str | None = None, memory_limit: str | None = None,
        precision: str | None = None, optimizer: str | None = None,
    ) -> Answer:  # fmt: skip
        """Find the fastest parallelization of a model on a cluster, write it to a plan file, and compare layouts.

        Takes seconds to minutes. Answers with the seconds of a step, the best other layouts and those of `like`, each
        with the reason why it is not the plan ("refused: 71.2 of 67.1 GiB, activations").

        Args:
            model: hf:PATH/config.json, or PATH.py:factory if the server trusts its folder.
            cluster: a name that the tool clusters lists, such as dgx-h100-x8, or a .toml file.
            output: where to write the plan file, below the server's folder.
            batch: rows of one training step over all devices.
            seq: sequence length.
            top: number of best layouts to compare.
            like: layouts to price beside the best, such as tp=8,dp=8,sp,zero=1,mbs=1.
            trainer: search only what this trainer can express, such as megatron or torchtitan.
            memory_limit: bytes per device, such as 70GiB.
            precision: precision policy, such as bf16-mixed.
            optimizer: adamw, sgd or sgd_momentum.
        """
        limits = self.run.limits
        file = limits.writable(output)
        document = await self.run.answer("plan", [limits.model(model)], {
            "cluster": limits.cluster(cluster), "output": file, "batch": batch, "seq": seq, "top": top,
            "like": list(like or ()), "for": trainer, "memory-limit": memory_limit, "precision": precision,
            "optimizer": optimizer,
        })  # fmt: skip
        stages = document.pop("stages")
        for row in document.get("layouts", ()):
            row.pop("plan", None)
        return {
            "plan": file, **{key: document[key] for key in KEPT_OF_PLANS if key in document},
            "schedule": document["schedule"][0],
            "stages": [
                {"mesh": each["mesh"], "devices": len(each["devices"]), "price": each["price"]} for each in stages
            ],
        }  # fmt: skip

    async def fits(
        self, model: str, cluster: str, layout: str, batch: int | None = None, seq: int | None = None,
        memory_limit: str | None = None, precision: str | None = None, optimizer: str | None = None,
    ) -> Answer:  # fmt: skip
        """Check whether a layout fits the devices' memory, and what would if it does not. Takes seconds.

        Args:
            model: hf:PATH/config.json, or PATH.py:factory if the server trusts its folder.
            cluster: a name that the tool clusters lists, "NAME as TRAINER", or a .toml file.
            layout: words such as tp=8,dp=8,sp,zero=1,mbs=1,recompute=full: dp, tp, sp, cp, ep, pp, vp, zero, fsdp, mbs.
            batch: rows of one training step over all devices.
            seq: sequence length.
            memory_limit: bytes per device, such as 70GiB.
            precision: precision policy, such as bf16-mixed.
            optimizer: adamw, sgd or sgd_momentum.
        """
        limits = self.run.limits
        return await self.run.answer("fits", [limits.model(model)], {
            "cluster": limits.cluster(cluster), "like": layout, "batch": batch, "seq": seq,
            "memory-limit": memory_limit, "precision": precision, "optimizer": optimizer,
        })  # fmt: skip

    async def explain(
        self, plan: str, op: str, instead: str | None = None, memory_limit: str | None = None
    ) -> Answer:
        """Explain why an operator of a plan is cut as it is, or why a stage begins where it does.

        Args:
            plan: a plan file.
            op: the path of a module, an operator as the plan file names it, or stage:1 for the cut before that stage.
            instead: another strategy to price, such as tensor=k.
            memory_limit: bytes per device for `instead`, such as 70GiB.
        """
        file = self.run.limits.readable(plan)
        return await self.run.answer("explain", [file, op], {
            "instead": instead, "memory-limit": memory_limit, "trust": self.run.limits.trusts_plan(file),
        })  # fmt: skip

    async def price(
        self, config: str, model: str, cluster: str, trainer: str | None = None, batch: int | None = None,
        seq: int | None = None, precision: str | None = None, memory_limit: str | None = None,
    ) -> Answer:  # fmt: skip
        """Price the config that somebody has for another trainer: seconds, memory, fits or not, what would help.

        Args:
            config: the trainer's file: ds_config.json, an accelerate yaml, Megatron arguments, TorchTitan overrides.
            model: hf:PATH/config.json, or PATH.py:factory if the server trusts its folder.
            cluster: a name that the tool clusters lists, or a .toml file.
            trainer: the trainer whose file it is, where the file does not show it.
            batch: rows of one training step over all devices, where the file does not say it.
            seq: sequence length, where the file does not say it.
            precision: precision policy, where the file does not say it.
            memory_limit: bytes per device, such as 70GiB.
        """
        limits = self.run.limits
        return await self.run.answer("price", [limits.readable(config)], {
            "model": limits.model(model), "cluster": limits.cluster(cluster), "of": trainer, "batch": batch, "seq": seq,
            "precision": precision, "memory-limit": memory_limit,
        })  # fmt: skip

    async def export(self, plan: str, trainer: str, output: str) -> Answer:
        """Write a plan as the files that a person runs with another trainer.

        Args:
            plan: a plan file.
            trainer: fsdp2, torchtitan, megatron, deepspeed or accelerate.
            output: the folder to write, below the server's folder.
        """
        limits = self.run.limits
        file = limits.readable(plan)
        return await self.run.answer("export", [file], {
            "to": trainer, "output": limits.writable(output), "trust": limits.trusts_plan(file),
        })  # fmt: skip

    async def clusters(self, names: list[str] | None = None) -> Answer:
        """List the clusters that can be planned for, or describe some of them.

        Args:
            names: clusters to describe, such as dgx-h100-x8; without them all are listed.
        """
        return await self.run.answer("clusters", [self.run.limits.cluster(name) for name in names or ()], {})

    def offered(self) -> dict[str, Tool]:
        """Return the tools whose commands this autopar has."""
        every: dict[str, Tool] = {
            "plan": self.plan, "fits": self.fits, "explain": self.explain, "price": self.price, "export": self.export,
            "clusters": self.clusters,
        }  # fmt: skip
        return {name: tool for name, tool in every.items() if name in self.run.names}
