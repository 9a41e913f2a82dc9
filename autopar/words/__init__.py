"""The words in which everything else speaks: what a model computes, and where its values live. None knows of a plan.

=================== ===================================================================================================
:mod:`.graph`       what a model computes: operators and tensors, nothing about devices
:mod:`.precision`   in which formats of numbers a run keeps and computes; :mod:`.narrow_products`: which formats of 8
                    and 4 bits there are for products; :mod:`.autocasting`: the autocast that is on
:mod:`.meshes`      devices in row-major order of axes that have names
:mod:`.placements`  where the values of one tensor live on each axis of a mesh
:mod:`.shards`      which part of a tensor each rank has, in such a state
:mod:`.load_shares` how rows spread over routed experts
:mod:`.labels`      names of operators, as people write them; :mod:`.texts`: meshes, bytes and seconds
:mod:`.trees`       nested values, as models take and return them
=================== ===================================================================================================
"""
