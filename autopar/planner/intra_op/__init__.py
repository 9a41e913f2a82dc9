"""The cut of every operator and parameter on one mesh.

Driven by :mod:`.mesh_plan`, a graph passes through:

======================= ===============================================================================================
:mod:`.pins`            what a user asks, as what is left of the choices
:mod:`.mesh_problem`    a graph on a mesh with a user's options: its problems, and plans of their solutions
:mod:`.building`        the integer program: what each operator can do, seconds and bytes of it; the mathematics
:mod:`.solving`         its solution; no other folder knows a solver
:mod:`.within_memory`   the cheapest plan whose bytes, counted in full, stay within the limit
:mod:`.offload_choice`  how much of a plan is moved to the memory of the host
:mod:`.plan_completion` decided strategies -> a whole plan; :mod:`.reshard`: its routes
:mod:`.memory`          decisions about memory, the ledger of what is held, and the peak of a step
:mod:`.one_device`      the plan for one device; :mod:`.random_plans`: random plans, for tests;
                        :mod:`.written_buffers`: buffers that operators write to;
                        :mod:`.kept_state`: caches, which later calls read
======================= ===============================================================================================
"""
