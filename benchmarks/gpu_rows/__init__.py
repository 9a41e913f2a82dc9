"""Rows of the first hour on GPUs (``benchmarks/first_hour.py``): each is a function that returns a :class:`Result`.

==================== =================================================================================================
:mod:`.table`        results, the table and the JSON file, which is written again after every row
:mod:`.workers`      rows run one by one in a process with a limit in seconds; the next process is already warm
:mod:`.ranks`        checks on all ranks: collectives, numbers, no waiting, CUDA graphs, memory
:mod:`.models`       GPT-2, Llama-1B, ResNet-50, ViT-L, T5-large and a Mixtral-like, at full and at quick size
:mod:`.rules`        every rule's samples in all strategies on the device
:mod:`.programs`     whole programs on a mesh of 2x2, many ranks in one process
:mod:`.steps`        seconds of a training step beside eager mode and ``torch.compile``; memory
:mod:`.kernels`      times of single kernels over shapes and dtypes
==================== =================================================================================================
"""
