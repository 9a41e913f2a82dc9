"""Exact plans of stages, and the simulation of the step that they make.

====================== ================================================================================================
:mod:`.exact_stages`   a way to cut planned stage by stage, and simulated
:mod:`.stage_plans`    stages that are alike are planned once; :mod:`.transplant`: a plan written for another of them
:mod:`.memory_shares`  what stages of one group have of its memory
:mod:`.shared_buffers` what stages on the same devices store once
====================== ================================================================================================
"""
