"""A batch on its way into programs, and what comes out of them.

==================== ===================================================================================================
:mod:`.calls`        however a call is spelt; :mod:`.module_calls`: which program it needs; :mod:`.batch`: its tensors,
                     checked and cut
:mod:`.runs`         any number of rows, as runs of equal microbatches
:mod:`.totals_ahead` what microbatches read of the whole batch; :mod:`.batch_statistics`: what each has of its own;
                     :mod:`.equal_rows`: inputs with unequal numbers of rows are refused
:mod:`.local_batch`  batches of which every rank has its own rows; :mod:`.uneven_rows`: not equally many;
                     :mod:`.row_sampler`: which rows of a data set each loads
:mod:`.same_batch`   whether all ranks were called alike; :mod:`.samples`: what they compare
:mod:`.outputs`      what a call gives back: plain, whole tensors
==================== ===================================================================================================
"""
