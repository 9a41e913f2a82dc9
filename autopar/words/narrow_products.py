"""Products in eight or four bits: formats, bytes moved by casts, and the part of a node.

Under a policy such as ``fp8-mixed`` the linear layers of a model's blocks multiply narrow copies of their activations,
weights and gradients; embeddings, logits, norms, attention and all that is added up stay as they are. A node that
takes part says so (:attr:`autopar.words.graph.Node.narrow`). Formats that ``runs`` names are operators of the program
(:mod:`autopar.rules.families.narrow_linear`); the others are for prices and bytes alone.

Numbers of passes follow NVIDIA's Transformer Engine, which casts into two copies, one for the product and one
transposed for the gradient, and keeps of the activations only the second for the backward.
"""

from __future__ import annotations

from typing import NamedTuple


class NarrowFormat(NamedTuple):
    """A number format of products.

    Attributes:
        rate: the device's rate at which the products run.
        needs: the rate that a device must have: its cores read such numbers with their scales.
        item_bytes: bytes of one element in one copy, scales included.
        passes: reads of a wide tensor to cast it: two where the largest value is searched first.
        scales: what has a scale of its own: a ``tensor``, a ``row`` of the two matrices that are multiplied, or a
            ``block`` of elements of it.
        gradients: the dtype of gradients.
        wide_weights: gradients of weights are products of wide numbers.
        runs: programs multiply so; else it is planned and priced.
    """

    rate: str
    needs: str
    item_bytes: float
    passes: int
    scales: str = "tensor"
    gradients: str = "float8_e5m2"
    wide_weights: bool = False
    runs: bool = False

    @property
    def copies_bytes(self) -> float:
        """Bytes of one element in the copy for the product and the transposed copy for the gradient."""
        return 2 * self.item_bytes

    def cast_bytes(self, wide: int) -> float:
        """Return the bytes read and written to cast one element of ``wide`` bytes into both copies."""
        return self.passes * wide + self.copies_bytes


FORMATS = {
    "fp8": NarrowFormat("float8", "float8", 1.0, 2, runs=True),
    "fp8-row": NarrowFormat("float8", "float8", 1.0, 1, "row", "float8_e4m3fn", wide_weights=True, runs=True),
    "fp8-delayed": NarrowFormat("float8", "float8", 1.0, 1),
    "mxfp8": NarrowFormat("float8", "float4", 1 + 1 / 32, 1, "block", "float8_e4m3fn"),
    "nvfp4": NarrowFormat("float4", "float4", 0.5 + 1 / 16, 2, "block", "float4_e2m1fn_x2"),
}
"""``fp8``: one scale a tensor, of its present values; ``fp8-row``: one for each row that is multiplied, while gradients
of weights stay wide (torchao's ``rowwise_with_gw_hp``); ``fp8-delayed``: of earlier steps' values, so that tensors are
read once; ``mxfp8``: a scale for each 32 elements; ``nvfp4``: of 4 bits, one for each 16, with a transform of the rows
before. The cores that know the last two are those with a rate for float4."""

NARROW_LINEAR = "autopar.narrow_linear.default"
"""The operator that formats which ``runs`` names are multiplied by (:mod:`autopar.rules.families.narrow_linear`)."""
FORWARD = "float8_e4m3fn"
"""The dtype of activations and weights in eight bits: four bits of exponent and three of mantissa, up to 448."""


class NarrowUse(NamedTuple):
    """The part of a node in narrow products.

    Attributes:
        format: a name of FORMATS.
        activations: positions in ``refs`` of values that are cast at every call; none for a parameter.
        weights: positions of weights, which are cast once a step.
        shared: the number of products that read the same activations, which are cast once for all of them.
        gathers: of a parameter: it may be gathered in that format, as only narrow products read it.
    """

    format: str
    activations: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    shared: int = 1
    gathers: bool = True

    @property
    def numbers(self) -> NarrowFormat:
        """The format."""
        return FORMATS[self.format]
