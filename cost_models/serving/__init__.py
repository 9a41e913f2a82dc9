"""Seconds and queues of engines that serve models: vLLM, SGLang, TensorRT-LLM. No torch, no model: numbers alone.

======================== ==============================================================================================
:mod:`.work`             the work of a step of an engine on the busiest device: products, attention, experts, exchanges
:mod:`.step_price`       seconds of a step; :mod:`.thin_products`: of matrix products from one row on;
                         :mod:`.decode_attention`: of attention, :mod:`.small_collectives`: of collectives of kilobytes;
                         :mod:`.expert_hits`: the experts that a step needs
:mod:`.queueing`         times of requests that share a worker, or that some workers prefill and others decode;
                         :mod:`.step_table`: many steps from few prices
======================== ==============================================================================================
"""
