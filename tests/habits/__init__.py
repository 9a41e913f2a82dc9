"""Small modules that write, alias, detach, hook, branch and keep state as real model code does.

``HABITS["name"]`` is a class; each is one habit, in a few lines. A class says what becomes of it:

* nothing: it trains as in eager mode on every path;
* ``refused = "..."``: a regular expression that the one clear :class:`AutoparError` matches, raised by ``parallelize``
  or by a later call, before any number that is not eager's.

The files hold one theme each. :mod:`habits.training` trains them.
"""

from habits.base import HABITS, Habit

from . import control, drops, gradients, inplace, leftovers, state, views, written  # noqa: F401  # they register their classes

__all__ = ["HABITS", "Habit"]
