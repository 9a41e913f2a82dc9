"""Reports about plans: rows of plain values, and their tables and pages.

=================== ===================================================================================================
:mod:`.rows`        operators, collectives, parameters and memory of one mesh; :mod:`.stages`: stages, and where a
                    step's seconds go
:mod:`.recomputed`  what runs again in the backward, or waits elsewhere until then, in words; :mod:`.on_host`: what is
                    in the memory of the host, and what copies cost
:mod:`.layouts`     layouts side by side; :mod:`.axes_in_words`: what each axis of a mesh cuts;
                    :mod:`.alternatives`: why a layout is not the plan
:mod:`.differences` in what two plans differ; :mod:`.profile_differences`: two profiles
:mod:`.decided`     what ``parallelize`` says, in five lines
:mod:`.why`         the price of every strategy that an operator has
:mod:`.coverage`    how much was priced from measurements
:mod:`.tables`      rows as tables of the terminal; :mod:`.trace`: timelines for Perfetto
memory              :mod:`.memory_contents`: what fills a device at the fullest moment; :mod:`.memory_snapshot`: over
                    a step, for torch's viewer of its allocator
:mod:`.fitted_tables` tables that fit the terminal
:mod:`.plan_in_words` a plan in the terms of trainers: ``TP 4, PP 8, ZeRO-1``; :mod:`.block_names`: ``layers 0 to 17``
:mod:`.parts`       how each part of a model is laid out; :mod:`.workload`: what is trained, and what it costs
:mod:`.serving_plot` the front of a plan for serving as a plot
:mod:`.page`        a plan as one HTML page
=================== ===================================================================================================
"""

from typing import Any, TypeAlias

Facts: TypeAlias = dict[str, Any]
"""Plain values by name, as commands print them with ``--json``."""
