"""Plan files of version 1, of which there were two kinds: of one mesh (``autopar_plan``), and pipelined.

They are read as files of today without checksums and prices: the decisions count, and are priced anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import PlanError
from autopar.plan import VERSION

SECTIONS = ("mesh", "fingerprint", "in_flight", "ops", "params", "buffers", "inputs", "outputs", "routes", "recompute",
            "gather_again", "make_again")


def is_one(raw: Any) -> bool:
    """Whether a parsed file is a plan of version 1."""
    return isinstance(raw, dict) and (raw.get("autopar_plan") == 1 or "autopar_pipeline" in raw)


def converted(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same decisions as a file of today has them; keys that no file of version 1 has are kept, to be refused.

    Raises:
        PlanError: the file has not even the form of its version.
    """
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


def _stage(raw: Mapping[str, Any], first: str, devices: Any) -> dict[str, Any]:
    return {"first": first, "devices": devices, **{key: raw[key] for key in SECTIONS if key in raw}}


__all__ = ["converted", "is_one"]
