"""Numbers in, seconds and bytes out. Floor 1: imports `hardware_profiles` only; no torch, no model.

======================= ===============================================================================================
:mod:`.costs`           what the planner asks for prices; :mod:`.data_sheet_costs` and :mod:`.measured` answer it, and
                        importing them makes them known (the one that is imported last is asked first)
:mod:`.operator_cost`   seconds of an operator from a data sheet
:mod:`.collective_cost` seconds of a collective; :mod:`.mesh_links`: which links it crosses; :mod:`.reshard_paths`: a
                        transfer's; :mod:`.parameter_overlap`: what a step waits for of those of parameters
:mod:`.optimizer_bytes` bytes that an optimizer keeps
:mod:`.fitting`         measurements as the few numbers of a curve
:mod:`.schedules`       schedules and their simulation; :mod:`.staging`: stages on unequal groups of devices
======================= ===============================================================================================
"""

from .collective_cost import KINDS as COLLECTIVE_KINDS
from .collective_cost import AxisCost
from .costs import Costs, cost_source, costs_of
from .data_sheet_costs import Roofline
from .measured import MeasuredCosts
from .mesh_links import mesh_axes
from .operator_cost import KINDS as OP_KINDS
from .operator_cost import op_seconds, peak_flops
from .optimizer_bytes import optimizer_state_bytes

__all__ = [
    "COLLECTIVE_KINDS", "OP_KINDS", "AxisCost", "Costs", "MeasuredCosts", "Roofline", "cost_source",
    "costs_of", "mesh_axes", "op_seconds", "optimizer_state_bytes", "peak_flops",
]  # fmt: skip
