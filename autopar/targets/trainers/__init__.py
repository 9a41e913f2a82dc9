"""Trainers, a file or a folder each, which defines ``TARGET``, a :class:`~autopar.targets.target.Target`.

The rest of autopar knows none of them by name. Their facts (fields, allowed values, versions) have their source beside
them.
"""
