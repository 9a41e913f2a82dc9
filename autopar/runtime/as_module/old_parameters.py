"""A model's own parameters after it was parallelized: who writes to them or freezes them means the parallel module's.

Each parameter is remembered with what a script may change of it. Versions, which autograd counts, show what is written
in place; ``p.data.mul_(...)`` leaves them as they are, so that now and then a sample of the values is compared, too.
"""

from __future__ import annotations

import operator
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.runtime.parameters.state import version_of

SAMPLE = 32
"""Elements of a parameter that are compared."""
_requires_grad = operator.attrgetter("requires_grad")
_now = operator.attrgetter("_version", "requires_grad")
_form = operator.attrgetter("dtype", "device", "shape")


class OldParameters:
    """Those of one model, as they were.

    Args:
        named: by name; they are not kept alive.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.names: list[str] = []
        self.refs: list[weakref.ref[torch.Tensor]] = []
        for name, param in named:
            self.names.append(name)
            self.refs.append(weakref.ref(param))
        self.remember()

    def remember(self) -> None:
        """Take them as they are now."""
        params = self.alive()
        self.versions = list(map(version_of, params))
        self.wanted = list(map(_requires_grad, params))
        self.forms = list(map(_form, params))
        self.bits = [_bits(param) for param in params]
        self._note(params)

    def _note(self, params: Sequence[torch.Tensor]) -> None:
        counted = [param for param in params if not param.is_inference()]  # those have no version
        self._counted, self._noted = [weakref.ref(param) for param in counted], list(map(_now, counted))

    def same(self) -> bool:
        """Whether none was frozen, or written to in autograd's sight, since they were looked at last; takes a tenth of
        a microsecond for each."""
        try:
            return [_now(ref()) for ref in self._counted] == self._noted
        except AttributeError:  # one is gone
            return False

    def alive(self) -> Sequence[torch.Tensor]:
        """The parameters themselves."""
        params = [ref() for ref in self.refs]
        if any(param is None for param in params):  # they are replaced, which is told elsewhere, or gone with the model
            kept = [(name, ref) for name, ref in zip(self.names, self.refs, strict=True) if ref() is not None]
            self.names, self.refs = [name for name, _ in kept], [ref for _, ref in kept]
            self.remember()
            return self.alive()
        return params  # type: ignore[return-value]

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Those that are still there, by name."""
        return [(name, param) for name, ref in zip(self.names, self.refs, strict=True) if (param := ref()) is not None]

    def frozen(self) -> dict[str, bool]:
        """Those whose ``requires_grad`` was changed, with what it is."""
        now = list(map(_requires_grad, self.alive()))
        if now == self.wanted:
            return {}
        return {name: is_ for name, is_, was in zip(self.names, now, self.wanted, strict=True) if is_ is not was}

    @property
    def on_devices(self) -> bool:
        """Whether some are on an accelerator, for whose values the host would have to wait."""
        return any(device.type not in ("cpu", "meta") for _, device, _ in self.forms)

    def written(self, thoroughly: bool = False) -> list[str]:
        """Names of those whose values or dtype were changed since they were looked at last, or are now.

        Args:
            thoroughly: compare values, which finds writes to ``p.data``.
        """
        params = self.alive()
        versions, forms = list(map(version_of, params)), list(map(_form, params))
        written = []
        for i, param in enumerate(params):
            dtype, device, _ = self.forms[i]
            if param.device != device and param.dtype == dtype:
                continue  # moved away to free memory
            seen = versions[i] != self.versions[i] or forms[i] != self.forms[i]
            if seen or (thoroughly and _bits(param) != self.bits[i]):
                written.append(self.names[i])
        self.versions, self.forms = versions, forms
        self._note(params)
        if written or thoroughly:
            self.bits = [_bits(param) for param in params]
        return written


def _bits(param: torch.Tensor) -> Any:
    """A checksum of a sample of the values; None where there are none."""
    if param.is_meta or not param.numel():
        return None
    flat = param.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)].cpu()
    return zlib.crc32(some.contiguous().view(torch.uint8).numpy().tobytes())


__all__ = ["OldParameters"]
