"""The step of a program, forward and backward, as one explicit graph that is run as Python, compiled, or recorded.

===================== ==================================================================================================
:mod:`.recording`     the operators that some code runs on tensors without values
:mod:`.adjoints`      one call of a program, differentiated: the operators of its forward and of its backward
:mod:`.nodes`         what a step calls besides operators: code under autograd, branches, tensors that are given up
:mod:`.building`      all calls of a program, and their backwards in reverse order, in one graph
:mod:`.again`         what the backward makes again instead of keeping it
:mod:`.giving_up`     results that wait elsewhere for the backward, such as in the memory of the host
:mod:`.in_place`      sums of gradients in the memory of one of them
:mod:`.handing_over`  gradients of parameters that are reduced while the backward goes on
:mod:`.halves`        a backward that is split: what some gradients need, and the rest
:mod:`.order`         collectives that overlap what need not wait for them
:mod:`.halves`        a backward in two halves: gradients of what arrived first, those of weights later
:mod:`.printing`      the graph as Python, in which every tensor is freed after its last use
===================== ==================================================================================================

A decision about a step is a pass: a function that changes the graph, in a file of its own.
"""
