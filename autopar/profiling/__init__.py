"""Profile-then-plan: measure a model's local ops, the transfers and the executor on this machine, as a cluster file.

================================= =====================================================================================
:mod:`.ops`                       which local ops can strategies produce; with what inputs they are measured
:mod:`.measure`                   their seconds, in the order and the circumstances of a running program
:mod:`.transfers_and_collectives` what is not an op: transfers, collectives, gradients that add up, optimizers, the
                                  executor itself
:mod:`.clock`                     seconds that a device works: of a thread, or between two events of a stream
:mod:`.quiet`                     what else the machine does meanwhile
:mod:`.document`                  all of it as a profile file
:mod:`.by_kind`                   a step that runs: seconds by kind of operator, and its most memory, beside the plan's
:mod:`.update`                    a profile corrected by such a step
================================= =====================================================================================

And :mod:`.measured_load`: what a model's routers do with a batch.
"""
