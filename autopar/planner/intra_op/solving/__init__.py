"""Solutions of the integer program.

====================== ================================================================================================
:mod:`.program_matrix` the problem as rows and columns
:mod:`.relaxation`     its relaxation in HiGHS, under a limit or at a price of a byte; :mod:`.engine`: a silent HiGHS
:mod:`.highs`          whole choices by HiGHS, or by :mod:`.cbc`; no other file knows a solver
:mod:`.mixture`        blocks that differ where memory binds
====================== ================================================================================================
"""
