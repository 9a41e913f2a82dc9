"""Seconds and queues of engines that serve models: vLLM, SGLang, TensorRT-LLM. No torch, no model: numbers alone.

================== ====================================================================================================
:mod:`.work`       the work of a step of an engine on the busiest device: products, attention, experts, exchanges
================== ====================================================================================================
"""
