"""A server of the Model Context Protocol, by which agents plan, price and explain: ``autopar-mcp --folder FOLDER``.

================= =====================================================================================================
:mod:`.serving`   the command line of the server
:mod:`.tools`     the tools: one function for each command, with the arguments that agents may give
:mod:`.limits`    what a client may name: files below the server's folder, models that run no code of theirs
:mod:`.commands`  a command of autopar in a process of its own, and its JSON answer
================= =====================================================================================================

It needs the extra ``autopar[mcp]``. A tool is a command of autopar with ``--json``, so its answer is the document that
docs/json.md describes, and its errors are the texts of the command line.
"""
