"""The number formats in which a training run stores and computes: a policy, separate from the plan of a model.

In mixed precision a parameter exists twice: as the *master*, which ``pm.parameters()`` returns, on which the optimizer
steps and which checkpoints contain, and as the copy that the program reads, cast after each step. Masters, their
moments and gradients are stored where the plan stores the parameter, in shards where that is cut (ZeRO); the cast copy
is gathered. Gradients are summed over ranks, and over the microbatches of a step, in a format of their own.

The names of the presets are those of Lightning; ``bf16-mixed`` is what torchtitan calls ``mixed_precision_param`` and
``mixed_precision_reduce`` (FSDP2's ``MixedPrecisionPolicy``), Megatron ``--bf16`` with main parameters and
``--accumulate-allreduce-grads-in-fp32``, and DeepSpeed ``bf16`` with fp32 master weights and gradient accumulation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, PlanError
from autopar.words.narrow_products import FORMATS as NARROW
from autopar.words.narrow_products import NarrowFormat

if TYPE_CHECKING:
    import torch  # the command line starts without it

_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}
OWN = "own"
"""In place of a format: that of each of the model's parameters. Only ``reduce`` is a choice then."""


@dataclass(frozen=True)
class Precision:
    """A precision policy; formats are dtypes, or their names.

    Attributes:
        params: the format of parameters as the program reads them, and of the model's floating point inputs, which are
            cast: so activations and gradients have it, too. Buffers are not cast, nor are parameters of norms with
            running statistics, which must have the statistics' format. ``"own"``: nothing is cast; parameters, masters
            and moments have the model's formats, and only ``reduce`` is a choice.
        master: the format of the stored parameters, on which the optimizer steps, and of their gradients.
        moments: the format of the optimizer's state: that of the masters, bfloat16 or float32. Steps are computed in
            the masters' format, or float32 where that has 16 bits.
        reduce: the format in which gradients are summed over ranks; for parameters that are cast, over the microbatches
            of a step too.
        stochastic_rounding: round what the optimizer writes in bfloat16, moments and masters, with random bits that do
            not depend on the mesh.
        products: the format in which linear layers of blocks are multiplied, of
            :data:`autopar.words.narrow_products.FORMATS`; empty: as ``params``. Programs multiply so in formats that
            ``runs`` names; in the others plans are priced.
        modules: the modules whose products are narrow, as patterns (``layers.*.mlp.*``), of which those behind ``!``
            are not; none: products with 512 features or more in modules of a list (``layers.3.mlp``).
        narrow_gathers: gather weights of such products over ranks in that format, where they are cut between steps or
            uses: masters are cast before, and no wide copy is kept.
    """

    params: Any = "bfloat16"
    master: Any = "float32"
    moments: Any = "float32"
    reduce: Any = "float32"
    stochastic_rounding: bool = False
    products: str = ""
    narrow_gathers: bool = False
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_products()
        if self.params == OWN:
            self._refuse_more_than_own()
            object.__setattr__(self, "master", OWN)
            object.__setattr__(self, "moments", OWN)
        for name in FORMATS:
            if name != "reduce" and self.params == OWN:
                continue
            value = str(getattr(self, name)).removeprefix("torch.")
            if value not in _BITS:
                raise AutoparError(f"precision: {name} is {value}; give {', '.join(_BITS)}")
            object.__setattr__(self, name, value)
        if self.params != OWN and (
            _BITS[self.master] < _BITS[self.params] or (_BITS[self.master] == 16 and self.master != self.params)
        ):
            raise AutoparError(
                f"precision: master is {self.master} and params {self.params}; masters are float32, or like params"
            )
        if self.moments not in (self.master, "bfloat16", "float32"):
            raise AutoparError(
                f"precision: moments are {self.moments} and masters {self.master}; give moments='{self.master}', "
                "'bfloat16' or 'float32'"
            )
        if not isinstance(self.stochastic_rounding, bool):
            raise AutoparError(f"precision: stochastic_rounding is {self.stochastic_rounding!r}; give True or False")
        if self.stochastic_rounding and "bfloat16" not in (self.master, self.moments):
            raise AutoparError(
                f"precision: stochastic_rounding applies to masters or moments in bfloat16, but masters are "
                f"{self.master} and moments {self.moments}; give moments='bfloat16', or leave it out"
            )

    def _check_products(self) -> None:
        """Refuse narrow products that mean nothing."""
        if self.products not in ("", *NARROW):
            raise AutoparError(f"precision: products are {self.products!r}; give {', '.join(NARROW)}, or none")
        if self.products and self.params == OWN:
            raise AutoparError(
                f"precision: params={OWN} keeps the model's formats, so products={self.products} is not possible; give "
                "params a format, such as bfloat16"
            )
        if isinstance(self.modules, str) or not all(isinstance(pattern, str) for pattern in self.modules):
            raise AutoparError(
                f"precision: {MODULES} are {self.modules!r}; give patterns, such as ('layers.*.mlp.*', '!*.gate')"
            )
        object.__setattr__(self, MODULES, tuple(self.modules))
        if self.modules and not self.products:
            raise AutoparError(f"precision: {MODULES} say which products are narrow; give products, or leave it out")
        if not isinstance(self.narrow_gathers, bool):
            raise AutoparError(f"precision: {GATHERS} is {self.narrow_gathers!r}; give True or False")
        if self.narrow_gathers and not self.products:
            raise AutoparError(f"precision: {GATHERS} applies to narrow products; give products, or leave it out")
        if self.narrow_gathers and NARROW[self.products].scales == "row":
            raise AutoparError(
                f"precision: {GATHERS} with products={self.products}: its products have scales of other rows in the "
                "forward and in the backward, so a weight is cast from the wide one twice; give products=fp8, or leave "
                f"{GATHERS} out"
            )

    @property
    def narrow(self) -> NarrowFormat | None:
        """The format of narrow products, if there are any."""
        return NARROW[self.products] if self.products else None

    @property
    def wide(self) -> Precision:
        """The policy without narrow products."""
        return replace(self, products="", narrow_gathers=False, modules=())

    def check_runs(self) -> None:
        """Refuse to run what is only priced.

        Raises:
            PlanError: products are in a format that no program multiplies in.
        """
        if self.narrow is not None and not self.narrow.runs:
            able = ", ".join(f"{name}-mixed" for name, numbers in NARROW.items() if numbers.runs)
            raise PlanError(
                f"precision {self}: products in {self.products} can be planned and priced, but not run: run {able}, or "
                f"'{self.wide}', whose plans take other seconds and bytes, or plan only"
            )

    def picks(self, module: str) -> bool | None:
        """Return whether products of a module are to be narrow; None if no patterns were given."""
        if not self.modules:
            return None
        chosen = [text for text in self.modules if not text.startswith(NOT)] or ["*"]
        left_out = [text.removeprefix(NOT) for text in self.modules if text.startswith(NOT)]
        return any(fnmatchcase(module, text) for text in chosen) and not any(fnmatchcase(module, t) for t in left_out)

    def _refuse_more_than_own(self) -> None:
        """Refuse choices other than ``reduce`` for parameters that keep the model's formats."""
        asked = [f"{name}={getattr(self, name)}" for name in ("master", "moments")
                 if getattr(self, name) not in (OWN, getattr(Precision, name))]  # fmt: skip
        asked += [f"{ROUNDING}=true"] if self.stochastic_rounding else []
        if asked:
            raise AutoparError(
                f"precision: params={OWN} keeps the model's formats, so {', '.join(asked)} is not possible; give "
                "params a format, or leave that out"
            )

    @property
    def text(self) -> str:
        """The name of a preset, or the differences from ``bf16-mixed``: ``params=float16,reduce=float16``."""
        name = next((name for name, preset in PRESETS.items() if preset == self), None)
        if name is not None:
            return name
        if self.params == OWN:
            return f"params={OWN},reduce={self.reduce}"
        texts = [f"{n}={getattr(self, n)}" for n in FORMATS if getattr(self, n) != getattr(MIXED, n)]
        texts += [f"{PRODUCTS}={self.products}"] if self.products else []
        texts += [f"{MODULES}={'|'.join(self.modules)}"] if self.modules else []
        return ",".join([*texts, *(f"{name}=true" for name in FLAGS if getattr(self, name))])

    def __str__(self) -> str:
        return self.text

    @property
    def low(self) -> torch.dtype | None:
        """The format in which the program computes; None if nothing is cast."""
        return None if self.params == OWN else _dtype(self.params)

    @property
    def reduced_in(self) -> torch.dtype:
        """The format in which gradients are summed."""
        return _dtype(self.reduce)

    @property
    def rounds(self) -> bool:
        """True if a step computes in other formats than it writes, which torch's optimizers do not."""
        return self.moments != self.master or self.stochastic_rounding

    def stored(self, dtype: str) -> str:
        """Return the format in which a parameter is stored that the program reads as ``dtype``."""
        return self.master if dtype in _BITS and self.master != OWN else dtype

    def kept(self, dtype: str) -> str:
        """Return the format of the moments of a parameter that the program reads as ``dtype``."""
        return self.moments if dtype in _BITS and self.moments != OWN else dtype

    def summed(self, dtype: str) -> str:
        """Return the format in which ranks sum gradients of a parameter that the program reads as ``dtype``."""
        return self.reduce if dtype in _BITS else dtype

    def accumulated(self, dtype: str) -> str:
        """Return the format in which gradients of a parameter of `dtype` are summed over a step's microbatches."""
        return self.summed(dtype) if self.stored(dtype) != dtype else dtype

    @contextlib.contextmanager
    def of_model(self, model: torch.nn.Module) -> Iterator[None]:
        """Cast the model's parameters to the program's format in this scope; afterwards they are unchanged."""
        low, beside_statistics = self.low, _beside_statistics(model)
        before = [
            (p, p.data)
            for p in model.parameters()
            if low is not None and str(p.dtype).removeprefix("torch.") in _BITS and id(p) not in beside_statistics
        ]
        try:
            for param, data in before:
                param.data = data.to(low)
            yield
        finally:
            for param, data in before:
                param.data = data

    def cast(self, value: object) -> object:
        """Return an input of the model in the program's format."""
        import torch

        low = self.low
        if low is not None and isinstance(value, torch.Tensor) and str(value.dtype).removeprefix("torch.") in _BITS:
            return value.to(low)
        return value


def _beside_statistics(model: torch.nn.Module) -> set[int]:
    """Return the ids of parameters of norms that keep running statistics: torch computes them in one format."""
    return {
        id(param)
        for module in model.modules()
        if getattr(module, "running_mean", None) is not None
        for param in module.parameters(recurse=False)
    }


def _dtype(name: str) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


ROUNDING = "stochastic_rounding"
GATHERS = "narrow_gathers"
FLAGS = (ROUNDING, GATHERS)
PRODUCTS, MODULES = "products", "modules"
NOT = "!"
"""Before a pattern of modules that are left out."""
FORMATS = tuple(f.name for f in fields(Precision) if f.name not in (*FLAGS, PRODUCTS, MODULES))
MIXED = Precision()
PRESETS = {
    "bf16-mixed": MIXED,
    "bf16-true": Precision(master="bfloat16", moments="bfloat16", reduce="bfloat16"),
    "16-mixed": Precision(params="float16"),
    "32-true": Precision(params="float32"),
    **{f"{name}-mixed": Precision(products=name) for name in NARROW},
}


def adding_up_in(policy: Precision | None, dtype: torch.dtype) -> Precision:
    """Return a policy with gradients summed in ``dtype``; without a policy all else is the model's."""
    return replace(policy, reduce=dtype) if policy is not None else Precision(params=OWN, reduce=dtype)


AUTO, OR = "auto", " or "
"""``auto``: the faster of :data:`ALLOWED` that fits; ``bf16-mixed or fp8-row-mixed``: of these."""
ALLOWED = ("bf16-mixed", "fp8-mixed")


def parse_choice(value: object) -> tuple[Precision, ...]:
    """Return the policies among which the fastest that fits is to be chosen; none if a single one is given, or none.

    Args:
        value: ``auto``, policies joined by `` or ``, or a list of policies.

    Raises:
        AutoparError: one of them is no policy.
    """
    if value == AUTO:
        value = ALLOWED
    elif isinstance(value, str) and OR in value:
        value = tuple(value.split(OR))
    if not isinstance(value, list | tuple):
        return ()
    policies = tuple(dict.fromkeys(parse_precision(each) for each in value))
    if not policies or None in policies:
        raise AutoparError(
            f"precision is {value!r}: a choice is among policies; give one or more, such as {list(ALLOWED)}"
        )
    return tuple(policy for policy in policies if policy is not None)


def parse_precision(value: object) -> Precision | None:
    """Return a policy from one, the name of a preset, or fields as ``params=bfloat16,reduce=bfloat16``.

    Raises:
        AutoparError: it is none, or a field has a value that means nothing.
    """
    if value is None or isinstance(value, Precision):
        return value
    if isinstance(value, str) and value in PRESETS:
        return PRESETS[value]
    if value == AUTO or isinstance(value, list | tuple) or (isinstance(value, str) and OR in value):
        raise AutoparError(
            f"precision is {value!r}, a choice, which plan and parallelize make; give one policy here, such as "
            f"{ALLOWED[0]}"
        )
    given = dict(part.partition("=")[::2] for part in value.split(",")) if isinstance(value, str) else {}
    flags = {name: text for name, text in given.items() if name in FLAGS}
    known = {*FORMATS, *FLAGS, PRODUCTS, MODULES}
    if not given or not set(given) <= known or not {*flags.values()} <= {"true", "false"}:
        raise AutoparError(
            f"precision is {value!r}; give {', '.join(PRESETS)}, {AUTO}, fields such as "
            "'params=bfloat16,reduce=bfloat16', or autopar.Precision(...)"
        )
    formats: dict[str, Any] = dict(given)
    formats |= {name: text == "true" for name, text in flags.items()}
    formats |= {MODULES: tuple(given[MODULES].split("|"))} if MODULES in given else {}
    return Precision(**formats)
