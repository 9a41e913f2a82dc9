"""Other people's training scripts on two ranks, with at most five changed lines each.

The scripts are not here: ``table.py`` says from which repository and commit each comes, ``diffs/`` what is changed in
it, ``today/`` what makes an older script run at all, ``data.py`` makes small data in the formats that they read,
``stubs/`` stands for packages that they import for data sets and pictures alone, ``stubs_of_metrics/`` for metrics.
``run.py`` runs them, ``started.py`` is what each process starts with.
"""
