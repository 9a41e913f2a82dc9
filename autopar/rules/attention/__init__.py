"""Attention.

=========================== ===========================================================================================
:mod:`.attention`           its rules
:mod:`.attention_in_blocks` with dropout, block by block; :mod:`.attention_on_gpus`: which of it has kernels there,
                            :mod:`.attention_triton`: these
=========================== ===========================================================================================

Long sequences, which are cut

========================= =============================================================================================
:mod:`.ring_attention`    the lowering; :mod:`.attention_call`: what of the call a rank has
:mod:`.attention_halves`  messages of the ring, and halves that ranks exchange
:mod:`.attention_pairs`   which queries meet which keys
:mod:`.attention_kernels` attention over some keys; :mod:`.attention_sums`: what such parts add up to
========================= =============================================================================================
"""
