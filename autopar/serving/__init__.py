"""Plans for serving a model: layouts of workers, requests in flight, and the times of requests.

======================== ==============================================================================================
:mod:`.records`          a plan for serving: load, workers with their layouts, predicted times, memory
:mod:`.plan_file`        a plan for serving as the text of a file, and back
:mod:`.planning`         from a model, a cluster and a load to a plan: what ``autopar plan --mode inference`` calls
:mod:`.by_arguments`     the same by the arguments of ``autopar.plan``
:mod:`.forward_capture`  the forward of one short request; :mod:`.skipped_blocks`: equal blocks are traced once or twice
:mod:`.attention_calls`  attention in a graph, what is cached for it, how far back it looks; :mod:`.known_values`: masks
                         are computed
:mod:`.weight_cuts`      cuts of weights by the integer program, forward only
:mod:`.model_work`       the work of a step under cuts; :mod:`.product_facts`: products of a graph;
                         :mod:`.row_kernels`: work on rows; :mod:`.number_formats`: bytes of numbers
:mod:`.worker_layouts`   layouts of a worker, and the work of a step under each; :mod:`.layout_words`: in words
:mod:`.worker_memory`    weights, cache and workspace of a device
:mod:`.search`           the search over layouts and requests in flight; :mod:`.front`: the front, and ranks
======================== ==============================================================================================

Models that generate on ranks of autopar's own are :mod:`autopar.inference`.
"""
