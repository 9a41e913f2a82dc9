"""The vocabulary of all other packages: the computation of a model and the layout of its values, without plans.

=================== ===================================================================================================
:mod:`.graph`       the computation of a model: operators and tensors, nothing about devices
:mod:`.precision`   number formats of a run; :mod:`.narrow_products`: formats of 8 and 4 bits for products;
                    :mod:`.autocasting`: the state of ``torch.autocast``; :mod:`.tracing`: records for a compiler
:mod:`.meshes`      devices in row-major order of axes that have names
:mod:`.placements`  the layout of one tensor on each axis of a mesh
:mod:`.shards`      the part of a tensor that each rank has in such a state
:mod:`.load_shares` the share of rows of each routed expert; :mod:`.exchanges`: how rows are exchanged between ranks
:mod:`.labels`      names of operators, as people write them; :mod:`.texts`: meshes, bytes and seconds;
                    :mod:`.trees`: nested containers of values
=================== ===================================================================================================
"""
