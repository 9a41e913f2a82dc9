"""Plan files of version 1, of which there were two kinds: of one mesh (``autopar_plan``), and pipelined.

They are read as files of today without checksums and prices: the decisions count, and are priced anew. Files of today's
version that were written before decisions about memory had one table have a section for each of three.
"""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.planfile.file_errors import Section
from autopar.plans.memory_decisions import RECOMPUTE, RECOMPUTE_RESULT, REGATHER
from autopar.plans.plan import VERSION

SECTIONS = ("mesh", "fingerprint", "in_flight", "ops", "params", "buffers", "inputs", "outputs", "routes", "recompute",
            "gather_again", "make_again")  # fmt: skip


APART = {"recompute": RECOMPUTE.name, "gather_again": REGATHER.name, "make_again": RECOMPUTE_RESULT.name}
"""Former sections of decisions that are in one table now."""


def is_one(raw: Section) -> bool:
    """Return True for a parsed plan file of version 1."""
    return isinstance(raw, dict) and (raw.get("autopar_plan") == 1 or "autopar_pipeline" in raw)


def converted(raw: Section, where: str) -> dict[str, object]:
    """Return the same decisions in today's form; keys that version 1 never had are kept, to be refused."""
    piped = "autopar_pipeline" in raw
    if piped and raw["autopar_pipeline"] != 1:
        raise PlanError(
            f"{where}: 'autopar_pipeline' is {raw['autopar_pipeline']!r}, of which this autopar reads 1; plan again, "
            "or use the autopar that wrote it"
        )
    try:
        stages = [_stage(raw, "", [])]
        if piped:
            stages = [_stage(stage["plan"], stage["first"], stage["devices"]) for stage in raw["stages"]]
        schedule = raw["schedule"] if piped else [f"schedule none stages 1 microbatches {raw['microbatches']}"]
        taken = {"autopar_plan", "autopar_pipeline", "model", "fingerprint", "cluster", "optimizer", "pins", "notes",
                 "schedule", "stages", "seconds", "checksum"}  # fmt: skip
        if not piped:
            taken |= {*SECTIONS, "microbatches", "pipeline", "price", "solution"}
        kept = ("model", "fingerprint", "cluster", "optimizer", "pins", "notes")
        return {
            "autopar_plan": VERSION, **{key: raw[key] for key in kept if key in raw},
            "schedule": schedule, "stages": stages, **{key: raw[key] for key in raw if key not in taken},
        }  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(
            f"{where}: a plan of version 1 that cannot be read ({error}); plan again, or use the autopar that wrote it"
        ) from None


def with_one_table(stage: Section) -> dict[str, object]:
    """Return a stage's entry with its decisions about memory in one table."""
    apart = {name: stage[key] for key, name in APART.items() if key in stage}
    table = stage.get("memory", {})
    if not isinstance(table, dict) or set(table) & set(apart):
        return dict(stage)  # to be refused
    rest = {key: value for key, value in stage.items() if key not in APART}
    return {**rest, "memory": {**apart, **table}} if apart else rest


def _stage(raw: Section, first: str, devices: list[int] | None) -> dict[str, object]:
    return {"first": first, "devices": devices, **{key: raw[key] for key in SECTIONS if key in raw}}
