"""Plain PyTorch: FSDP2, tensor parallel styles and ``torch.distributed.pipelining``, for any captured model.

===================== ==================================================================================================
:mod:`.sayable`       the words of a layout that plain torch can say, and which it refuses for a model
:mod:`.decisions`     from a plan to tables: what is sharded, checkpointed, cut, and where stages begin
:mod:`.inputs`        the inputs of a model by name, and a rank's microbatch of them
:mod:`.batch_loss`    whether losses of parts of a batch add up to its loss
:mod:`.patterns`      patterns of module paths
:mod:`.staging`       stages as blocks of the model, tried on shapes
:mod:`.recording`     what a call on shapes shows of a model's modules
:mod:`.tensor_styles` styles of modules from the states of tensors in a plan
:mod:`.tensor_trial`  whether a model's own code runs on shards
:mod:`.writing`       the files of the folder
:mod:`.reading`       from the tables of such a folder to the words of a layout
:mod:`.folder`        the code of the files
===================== ==================================================================================================

``folder/`` has the code of the files, which imports nothing of autopar: each table in it is replaced by that of a plan.
"""

from __future__ import annotations

from autopar.targets.target import Target
from autopar.targets.trainers.fsdp2.reading import read, reads
from autopar.targets.trainers.fsdp2.sayable import WORDS, refuses
from autopar.targets.trainers.fsdp2.writing import write

TARGET = Target(
    name="fsdp2", title="PyTorch 2.11 to 2.13: FSDP2", software="fsdp2", words=WORDS, write=write,
    refuses=refuses, reads=reads, read=read,
)  # fmt: skip
