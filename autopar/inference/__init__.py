"""Inference: plans for serving a model, and the model that generates on several ranks.

======================== ==============================================================================================
:mod:`.records`          a plan for serving: load, workers with their layouts, predicted times, memory
:mod:`.plan_file`        a plan for serving as the text of a file, and back
:mod:`.planning`         from a model, a cluster and a load to a plan: what ``autopar plan --mode inference`` calls
:mod:`.forward_capture`  the forward of one short request; :mod:`.skipped_blocks`: equal blocks are traced once or twice
:mod:`.attention_calls`  attention in a graph, what is cached for it, how far back it looks; :mod:`.known_values`: masks
                         are computed
:mod:`.weight_cuts`      cuts of weights by the integer program, forward only
:mod:`.model_work`       the work of a step under cuts; :mod:`.row_kernels`: that on rows; :mod:`.number_formats`: bytes
                         of numbers
:mod:`.worker_layouts`   layouts of a worker, and the work of a step under each; :mod:`.layout_words`: in words
:mod:`.worker_memory`    weights, cache and workspace of a device
:mod:`.search`           the search over layouts and requests in flight; :mod:`.front`: the front, and ranks
======================== ==============================================================================================

The model that generates, from ``parallelize(mode="inference")`` down:

====================== ================================================================================================
:mod:`.prepared`       what is spread in place of the model, and what the user gets; the example of one token
:mod:`.generating`     a model of ``transformers`` whose own ``generate`` runs programs; what it refuses
:mod:`.cached_models`  such a model as a module of tensors, with its caches as buffers; its encoder apart
:mod:`.plain_models`   plain torch models with caches, and a loop that generates
:mod:`.cache_calls`    calls filled up to the shapes of programs; steps of an engine
====================== ================================================================================================
"""
