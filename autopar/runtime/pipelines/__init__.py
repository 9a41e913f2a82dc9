"""A model in stages.

========================= ==============================================================================================
:mod:`.pipeline`          ``PipelineRun``: a step of all stages, and what crosses them
:mod:`.pipeline_start`    what its ranks make together first; :mod:`.schedule_check`: schedules that cannot be run
:mod:`.pipeline_programs` its programs by shapes and by the model's values
:mod:`.pipeline_runs`     a batch as it goes through them; :mod:`.ready_runs`: runs with their programs
:mod:`.asynchronous`      pipelines that never drain; :mod:`.weight_versions`: the weights of microbatches in flight
:mod:`.rank_actions`      what one rank does in a step, action by action
:mod:`.stage_in_flight`   a stage with the microbatches that are in flight; :mod:`.backward`: a backward in halves
:mod:`.wires`             messages between stages; :mod:`.received_tensors`: tensors of others, and their gradients
:mod:`.ties`              parameters that several stages use; :mod:`.input_gradients`: gradients of the inputs
:mod:`.pipeline_outputs`  what its forward gives
========================= ==============================================================================================
"""
