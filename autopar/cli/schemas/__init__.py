"""Schemas of what commands print with ``--json``: one dataclass for each answer, in one table.

========================= =============================================================================================
:mod:`.registry`          the table :data:`~.registry.ANSWERS`, and how an answer gets into it
:mod:`.loading`           :func:`~.loading.load_answer`: a document as the object of its schema; unknown keys, missing
                          ones and wrong types are refused
:mod:`.errors`            the answer of a command that failed; :mod:`.alternatives`: layouts and why they are not chosen
:mod:`.planning`          ``plan``, ``fits``
:mod:`.plans`             ``show``, ``explain``, ``check``, ``memory``, ``diff``; :mod:`.stages`: ``simulate``
:mod:`.models`            ``inspect``; :mod:`.running`: ``run``, ``verify``, ``profile``
:mod:`.serving`           ``plan --mode inference``
:mod:`.trainers`          ``export``, ``price``, ``launch``; :mod:`.resharding`: ``reshard``
:mod:`.hardware`          ``devices``, ``clusters``, ``clusters new``
========================= =============================================================================================

A new answer is a dataclass under :func:`~.registry.answer` in one of these files (or in a new one, imported below), and
the name of it in the command's :func:`autopar.cli.common.print_json`. ``docs/json.md`` is made from the table.
"""

from autopar.cli.schemas import errors as errors
from autopar.cli.schemas import hardware as hardware
from autopar.cli.schemas import models as models
from autopar.cli.schemas import planning as planning
from autopar.cli.schemas import plans as plans
from autopar.cli.schemas import resharding as resharding
from autopar.cli.schemas import running as running
from autopar.cli.schemas import serving as serving
from autopar.cli.schemas import stages as stages
from autopar.cli.schemas import trainers as trainers
from autopar.cli.schemas.registry import ANSWERS as ANSWERS
from autopar.cli.schemas.registry import id_of as id_of
