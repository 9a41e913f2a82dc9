"""Costs: seconds and bytes from numbers. Floor 1: imports `hardware_profiles` only; no torch, no model.

======================= ===============================================================================================
:mod:`.costs`           the interface that the planner asks for prices; :mod:`.data_sheet_costs` and :mod:`.measured`
                        implement it and register on import (the last one imported is asked first)
:mod:`.operator_cost`   seconds of an operator from a data sheet
:mod:`.collective_cost` seconds of a collective; :mod:`.mesh_links`: the links it crosses; :mod:`.reshard_paths`: the
                        links of a transfer; :mod:`.joined_axes`: several axes as one; :mod:`.parameter_overlap`:
                        exposed collectives of parameters; :mod:`.chunked_exchange`: exchanges in chunks beside products
:mod:`.host_link`       copies to and from the memory of the host, beside compute; :mod:`.host_step`: an optimizer's
                        step there
:mod:`.optimizer_bytes` bytes of optimizer state; :mod:`.matrix_steps`: who steps on which whole matrix (Muon), and the
                        work and bytes of that
:mod:`.fitting`         curves fitted to measurements
:mod:`.schedules`       schedules and their simulation; :mod:`.staging`: stages on unequal groups of devices
:mod:`.serving`         engines that serve models: the work of a step, its seconds, queues
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
