"""A stage at run time: a program on one mesh with what it reads. A whole model has one.

======================= ================================================================================================
:mod:`.home`            the module whose parameters and buffers stages read; :mod:`.registering`: placed there
:mod:`.plan_groups`     the process groups that a plan needs
:mod:`.stage`           bind, run forward, run backward or its halves, hand over gradients, free
:mod:`.buffer_versions` buffers of which the program is given a copy
:mod:`.seeds`           of random operators: each call takes one from torch's generator
:mod:`.branch_checks`   whether branches on data would go the ways that the program follows; :mod:`.async_host_reads`:
                        numbers that the host reads when they have come
:mod:`.compiled`        programs under torch.compile; :mod:`.compiled_order`: their collectives, alike on all ranks
:mod:`.step_program`    a program as an explicit step, which is one node of autograd's graph
:mod:`.graph_compiler`  graphs of operators by a backend of torch.compile; :mod:`.compiled_graph`: their calls
======================= ================================================================================================
"""
