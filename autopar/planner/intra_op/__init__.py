"""How every operator and parameter is cut on one mesh.

In the order in which a graph passes through, driven by :mod:`.mesh_plan`:

========================= =============================================================================================
:mod:`.options`           what a user may ask; :mod:`.pinned_choices`: what pins leave of the choices
:mod:`.clashing_pins`     which pins leave no plan, where there is none
:mod:`.mesh_problem`      a graph on a mesh with what is asked: its problems, and plans of their solutions
:mod:`.within_memory`     the cheapest plan whose bytes, counted in full, stay within the limit
:mod:`.fold`              identical blocks are found and decided once
:mod:`.space`             what each operator can do on each axis; :mod:`.params`: how a parameter can be stored and
                          used
:mod:`.price`             seconds and bytes of an operator and of a step of a reshard; :mod:`.hidden`: seconds of
                          collectives that pass while others compute, :mod:`.overlaps`: in the problem
:mod:`.build`             graph -> :mod:`.problem`: numbers only; here stands the mathematics
:mod:`.chains`            operators that follow each other's cuts, decided as one; :mod:`.flows`: tensors on the way to
                          their readers
:mod:`.decoder`           a solution, read back
:mod:`.kept`              what autograd keeps, as bytes of every operator's strategies
:mod:`.moment_rows`       what is there at one moment of a step, likewise: the rows of the memory limit
:mod:`.matrix`            the problem as rows and columns
:mod:`.relaxation`        its relaxation in HiGHS, under a limit or at a price of a byte
:mod:`.ilp`               whole choices by HiGHS, or by :mod:`.by_cbc`; no other file knows a solver
:mod:`.effort`            when a run of the solver ends without a proof
:mod:`.mixture`           blocks that differ where memory binds
:mod:`.complete`          decided strategies -> a whole plan; :mod:`.reshard`: its routes; :mod:`.recompute`: its
                          segments
:mod:`.recompute_choices` which operators may run again in the backward instead of being kept
:mod:`.memory_offers`     what may be done about memory, as strategies of the program
:mod:`.ledger`            what is held from the forward to the backward, why, and how that was decided;
                          :mod:`.memory_walk`: found out, operator by operator
:mod:`.moments`           what lives at each moment of a microbatch; :mod:`.reshard_needs`: and beside a reshard's step
:mod:`.stage_peaks`       the peak of a step, with others in flight: working memory
:mod:`.single`            the plan for one device; :mod:`.draw`: random plans, for tests; :mod:`.written`: buffers that
                          operators write to
========================= =============================================================================================
"""
