"""Measurement of a model's local ops, of transfers and of the executor on this machine, as a cluster file.

================================= =====================================================================================
:mod:`.ops`                       the local ops that strategies can produce, and the inputs to measure them with
:mod:`.measure`                   their seconds, in the order and the circumstances of a running program
:mod:`.transfers_and_collectives` transfers, collectives, gradient accumulation, optimizers, the executor itself
:mod:`.clock`                     seconds of a device: of a thread, or between two events of a stream
:mod:`.quiet`                     load of the machine by other processes
:mod:`.document`                  all of it as a profile file
:mod:`.by_kind`                   seconds by kind of operator and peak memory of a real step, next to the plan's
:mod:`.update`                    a profile corrected by such a step
:mod:`.collective_seconds`        how long collectives took, as torch's profiler saw them
:mod:`.measured_load`             distribution of a batch over routed experts
================================= =====================================================================================
"""
