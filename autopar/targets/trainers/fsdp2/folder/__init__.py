"""The files of an exported folder, with tables for one device. They run there, and import nothing of autopar.

======================= ================================================================================================
:mod:`.train`           the script: model, data, optimizer, loop
:mod:`.parallelize`     tables of decisions, and what applies them
:mod:`.tensor_parallel` tensor parallel styles of torch from a table
:mod:`.pipeline`        stages made from the model's own code, and their schedule
======================= ================================================================================================
"""
