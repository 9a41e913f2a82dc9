"""The option ``offload``: it says what a plan may keep in the memory of the host.

================ =====================================================================================================
``activations``  results of operators that wait for their backward; ``activations=layers.*``: all those of the
                 operators of modules that match, and no others
``optimizer``    the state of the optimizer with the values that it steps on; the step runs on the host
``parameters``   the same, and the device has no copy between uses: the host's values are copied in for each of them
================ =====================================================================================================

Each may stand alone, and is then a choice of the planner (``offload="optimizer"``), or with the least share of the
bytes that it is about (``offload={"optimizer": 0.5}``, on the command line ``--offload optimizer=0.5``). ``auto``
allows all of them that can be, ``none`` none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeGuard

from autopar.errors import PlanError

OffloadWish: TypeAlias = "str | Sequence[str] | Mapping[str, float | bool | Sequence[str]]"


@dataclass(frozen=True)
class Offload:
    """What may be kept in the memory of the host.

    Each is None where it may not be; else the least share of the bytes, from 0 (the planner chooses) to 1 (all).
    Activations have no share: they are 0, or the patterns of modules whose results are moved whatever that costs.

    Attributes:
        is_auto: as ``auto`` says it: what cannot be moved is left out, where by name it would be refused.
    """

    activations: float | tuple[str, ...] | None = None
    optimizer: float | None = None
    parameters: float | None = None
    is_auto: bool = False

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in WHAT)

    @property
    def text(self) -> str:
        """As it is written: ``auto``, or ``activations,optimizer=0.5``; empty where nothing may be moved."""
        if self == Offload(0.0, 0.0, 0.0, is_auto=True):
            return AUTO
        said = [f"{ACTIVATIONS}={pattern}" for pattern in self.patterns] or [ACTIVATIONS] * self.chooses_activations
        shares = {name: share for name in WHAT[1:] if (share := getattr(self, name)) is not None}
        return ",".join([*said, *(f"{name}={share:g}" if share else name for name, share in shares.items())])

    @property
    def chooses_activations(self) -> bool:
        """Whether the planner chooses which activations are moved."""
        return self.activations is not None and not self.patterns

    @property
    def of_parameters(self) -> bool:
        """True if parameters or the state of the optimizer may be stored on the host."""
        return self.optimizer is not None or self.parameters is not None

    @property
    def of_activations(self) -> Offload:
        """The same without parameters and state."""
        return replace(self, optimizer=None, parameters=None)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Paths of the modules whose results are moved; none where the planner chooses."""
        return self.activations if isinstance(self.activations, tuple) else ()


NOTHING = Offload()
WHAT = ("activations", "optimizer", "parameters")
"""What may be kept on the host, in the order in which it is listed."""
ACTIVATIONS = WHAT[0]
NONE, AUTO = "none", "auto"
EVERY = "*"
"""The pattern of all modules."""


def is_offload(value: object) -> bool:
    """Return whether a value has the type of the option."""
    if isinstance(value, Mapping):
        return all(
            isinstance(name, str) and (isinstance(share, (int, float)) or (name == ACTIVATIONS and _are_texts(share)))
            for name, share in value.items()
        )
    return isinstance(value, str) or _are_texts(value)


def _are_texts(value: object) -> TypeGuard[Sequence[str]]:
    return isinstance(value, (list, tuple)) and all(isinstance(x, str) for x in value)


def parse_offload(wish: OffloadWish | None, where: str = "offload") -> Offload:
    """Return what a user lets a plan move to the host.

    Args:
        wish: ``"optimizer"``, ``"activations,optimizer=0.5"``, a list of such words, a dict of shares, ``"auto"`` or
            ``"none"``; None for nothing.
        where: the option's name, for messages.

    Raises:
        PlanError: a word is none of these, stands there twice, or a share is none from 0 to 1.
    """
    if wish is None:
        return Offload()
    patterns: list[str] = []
    if isinstance(wish, Mapping):
        pairs = [(name, share) for name, share in wish.items() if share is not False]
        patterns = [pattern for name, those in pairs if _are_texts(those) and name == ACTIVATIONS for pattern in those]
        shares = {
            name: 0.0 if share is True or _are_texts(share) else _share(name, share, where) for name, share in pairs
        }  # fmt: skip
    else:
        words = wish.split(",") if isinstance(wish, str) else [word for text in wish for word in text.split(",")]
        words = [word.strip() for word in words if word.strip()]
        if words == [NONE]:
            return Offload()
        if words == [AUTO]:
            return Offload(0.0, 0.0, 0.0, is_auto=True)
        shares = {}
        for word in words:
            name, equals, said = word.partition("=")
            if name == ACTIVATIONS and equals:
                patterns.append(said)
                shares[name] = 0.0
                continue
            if name in shares:
                raise PlanError(f"{where}: '{name}' is given twice; keep one of them")
            shares[name] = _share(name, said, where) if equals else 0.0
    for name in shares:
        if name not in WHAT:
            raise PlanError(
                f"{where}: '{name}' is nothing that can be kept on the host; give {', '.join(WHAT)}, each alone or "
                f"with the least share of it, such as {where} optimizer=0.5; or {AUTO}, or {NONE}"
            )
    share = shares.pop(ACTIVATIONS, None)
    if share not in (None, 0.0, 1.0):
        raise PlanError(
            f"{where}: a share of the activations, {share:g}, cannot be asked for; give modules, as in "
            f"'{ACTIVATIONS}=layers.*', or '{ACTIVATIONS}' and a memory limit"
        )
    activations = tuple(patterns) or ((EVERY,) if share else share)
    return Offload(activations, shares.get("optimizer"), shares.get("parameters"))


def paths_of(module: str) -> list[str]:
    """Return the path of a module and those of all modules around it."""
    parts = module.split(".")
    return [".".join(parts[: k + 1]) for k in range(len(parts))]


def _share(name: str, said: object, where: str) -> float:
    try:
        share = float(said)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise PlanError(
            f"{where}: the share of '{name}' is {said!r}; give a number from 0 (the planner chooses) to 1 (all of it)"
        )
    return share
