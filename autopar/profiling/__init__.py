"""Profile-then-plan: measure a model's local ops, the transfers and the executor on this machine, as a cluster file.

    ops        which local ops can strategies produce; with what inputs they are measured
    measure    their seconds, in the order and the circumstances of a running program
    around     what is not an op: transfers, collectives, gradients that add up, optimizers, the executor itself
    document   all of it as a profile file
"""
