"""The plan file: JSON that people read, edit, review and keep.

An example::

    {
      "autopar_plan": 2,                               version of this format
      "model": {"spec": "gpt.py:make"},                how to load the model again; null when it was passed as an object
      "fingerprint": "26fa0c71b0a3b94c",               of the captured graph, of one microbatch
      "cluster": "dgx-h100", "optimizer": "adamw",
      "seconds": 0.17,                                 of a step
      "pins": {"params": {"*.norm.*": "replicate"}, "memory_limit_bytes": 75161927680},        what the user asked for
      "schedule": ["schedule none stages 1 microbatches 4"],
      "stages": [
        {
          "first": "embedding", "devices": [0, 1, 2, 3, 4, 5, 6, 7], "mesh": "data=2,tensor=4",
          "fingerprint": "26fa0c71b0a3b94c",
          "ops":     {"layers.*.mlp.up:linear": {"data": "b", "tensor": "n"}},
          "params":  {"layers.*.mlp.up.weight": {"stored": "S1,S0", "used": "R,S0", "lifetime": "use"}},
          "buffers": {}, "inputs": {"x": "S0,R"}, "outputs": ["I,I"],
          "routes":  {"layers.*.mlp.down:linear": ["S0,P -> S0,I"]},
          "price": {...}, "solution": {...}, "checksum": {...}
        }
      ],
      "notes": [], "checksum": "..."
    }

A model that is not cut has one stage; the rows of its schedule, forward and backward of each microbatch in turn, may be
left out, and so may its devices, if they are the first ones. A stage begins at its first operator and ends where the
next one begins; ranks of the schedule are groups of devices.

``ops``, ``params`` and ``routes`` are lists of ``pattern: decision``; ``*`` stands for anything, and later entries
override earlier ones. Ops are named ``module:op``, or by module alone (then the decision goes to those of its ops that
have the factor). An axis that is not named is ``replicate``. Ops that no entry names are whole on every rank if they
depend on a parameter; the others follow what their readers want.

The checksums cover the decisions, not the text. After an edit by hand they do not match: routes that no longer fit are
found anew, and the price is computed anew, so a file never shows the price of another plan. Loading executes nothing;
the commands that look at a plan import the model that it names only where the user says so (``--trust``).

===================== =================================================================================================
:mod:`.reading`       text and graph become a plan; :mod:`.writing`: a plan becomes text
:mod:`.parsing`       the form of a file, without the model; :mod:`.file_errors`: all that is wrong, at once
:mod:`.stage_entries` decisions of a file, for the nodes that the model has; :mod:`.states`: placements
:mod:`.patterns`      many decisions as few patterns; :mod:`.pins`: what the user asked for
:mod:`.repricing`     prices of the file, or anew where it was edited
:mod:`.previous`      files of version 1
===================== =================================================================================================
"""

from __future__ import annotations

from autopar.planfile.parsing import Document, parse
from autopar.planfile.reading import bind, load, loads, open_, read
from autopar.planfile.writing import dumps, save

__all__ = ["Document", "bind", "dumps", "load", "loads", "open_", "parse", "read", "save"]
