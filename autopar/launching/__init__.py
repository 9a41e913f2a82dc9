"""Launch scripts: what starts the ranks of a job on the machines of a cluster, under torchrun or Slurm.

Everything here is a function of a cluster, the words that a rank runs, and environment variables; what trains is not
known here. Functions return texts and write nothing.

================ ======================================================================================================
:mod:`.job`      machines, ranks and environment of a job, from a cluster
:mod:`.scripts`  the job as a script for torchrun or Slurm, and in words
================ ======================================================================================================
"""
