"""Seconds of an exchange in chunks beside products: some rows are computed while others are on their way.

Rows are sent in chunks, computed, and sent back. Exchanges run one after the other on the links, products one after the
other on the device, and both at the same time; every chunk has an equal part. Of the exchanges, the first one and the
last one are waited for, and what takes longer than the products beside it.
"""

from __future__ import annotations

from typing import NamedTuple


class ChunkedExchange(NamedTuple):
    """The exchanges around the products of one pass.

    Attributes:
        there: seconds of all chunks on the way there; ``back``: on the way back.
        chunks: their number.
        beyond: seconds of an exchange that is made at once on the far side of one that is in chunks: after it in a
            forward, before it in a backward.
    """

    there: float = 0.0
    back: float = 0.0
    chunks: int = 1
    beyond: float = 0.0

    def forward(self, products: float, beside_there: float = 0.0, beside_back: float = 0.0) -> float:
        """Return the seconds of a forward, with what others compute while the first and the last rows travel."""
        if not self.beyond:
            return self._pipelined(products, beside_there, beside_back)[1]
        return self._pipelined(products, beside_there, 0.0)[1] + max(self.beyond, beside_back)

    def backward(self, products: float, beside_there: float = 0.0, beside_back: float = 0.0) -> float:
        """Return the seconds of a backward, in which gradients go the same ways in reverse."""
        reverse = ChunkedExchange(self.back, self.there, self.chunks)
        if not self.beyond:
            return reverse._pipelined(products, beside_back, beside_there)[1]
        return max(self.beyond, beside_back) + reverse._pipelined(products, 0.0, beside_there)[1]

    def waits(self, products: float) -> tuple[float, float]:
        """Return the seconds of a forward without a product, up to the last product and after it."""
        computed, ended = self._pipelined(products, 0.0, 0.0)
        return computed - products, ended - computed + self.beyond

    def waits_back(self, products: float) -> tuple[float, float]:
        """Return the same of a backward, by the exchange of the forward: on the way there, on the way back."""
        last, first = ChunkedExchange(self.back, self.there, self.chunks).waits(products)
        return first, last + self.beyond

    def _pipelined(self, products: float, before: float, after: float) -> tuple[float, float]:
        """Return when the last product ends, and when all has ended."""
        n = self.chunks
        computed, sent = before, self.there
        for k in range(1, n + 1):
            computed = max(computed, self.there * k / n) + products / n
            sent = max(sent, computed) + self.back / n
        return computed, max(computed + after, sent)
