"""The answer of ``reshard``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from autopar.cli.schemas.registry import answer


@dataclass(frozen=True, kw_only=True)
class MovedParameter:
    """The bytes of one parameter that move."""

    name: Annotated[str, "its name"]
    n_bytes: Annotated[int, "bytes of all messages"]
    stays_bytes: Annotated[int, "bytes that ranks have already"]


@answer("reshard", "autopar reshard")
@dataclass(frozen=True, kw_only=True)
class ReshardAnswer:
    """The price of moving weights from one plan's layout to another's; ranks are devices of the cluster."""

    cluster: Annotated[str, "the cluster, or both of them on one network"]
    parameters: Annotated[int, "number of parameters"]
    moments: Annotated[int, "tensors of optimizer state that move with each parameter"]
    bytes: Annotated[int, "bytes of all messages"]
    stays_bytes: Annotated[int, "bytes that ranks have already"]
    messages: Annotated[int, "number of messages"]
    by_link: Annotated[dict[str, int], "bytes by link"]
    crossing_bytes: Annotated[int | None, "bytes between the two sets of devices; null if they share devices"]
    sent: Annotated[dict[str, int], "bytes sent by rank"]
    received: Annotated[dict[str, int], "bytes received by rank"]
    seconds: Annotated[float, "seconds if all parameters move at once"]
    limited_by: Annotated[str, "the busiest link"]
    one_by_one_seconds: Annotated[float, "seconds if one parameter moves after the other"]
    old_bytes: Annotated[int, "most bytes of old shards on a device"]
    new_bytes: Annotated[int, "most bytes of new shards on a device"]
    peak_bytes: Annotated[int, "most bytes on a device if all parameters move at once"]
    one_by_one_peak_bytes: Annotated[int, "most bytes on a device if one parameter moves after the other"]
    largest: Annotated[list[MovedParameter], "the parameters of which most moves"]
