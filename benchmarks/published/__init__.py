"""Published training runs, priced as they ran.

``rows.py`` reads a row of a table of published runs; ``built_models.py`` (with ``gpt.py``) builds its model,
``built_clusters.py`` its cluster, ``pricing.py`` prices the two under the row's layout, ``errors.py`` compares prices
with what was measured, and ``page.py`` writes that as a page of docs. ``benchmarks/accuracy.py`` is the command.
"""
