"""Ranks together: how they start, agree, fail and end.

====================== =================================================================================================
:mod:`.launch`         processes on this machine
:mod:`.agent_messages` what ranks tell :mod:`autopar.elastic`, which has started them
:mod:`.attempts`       ranks that were started again see nothing of those before them
:mod:`.devices`        one device for each rank; :mod:`.streams`: the stream on which a step runs
:mod:`.groups`         process groups, each made once; :mod:`.collectives`: torch's, of any dtype
:mod:`.agree`          one plan, and errors that are raised everywhere
:mod:`.failures`       a step that breaks on one rank; :mod:`.presence`: one that ends within ``parallelize``
:mod:`.pulse`          one that is stopped, or hangs; :mod:`.ended`: ranks that have ended
:mod:`.watch`          the thread that looks into the store for all of these
:mod:`.store_meeting`  ranks tell each other through the store, in places that have :mod:`.store_names`;
                       :mod:`.collective_log`: what they do together
====================== =================================================================================================
"""
