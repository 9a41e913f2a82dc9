"""Print the options of ``vllm serve`` as its own parser has them, as JSON: names, and values where they are few."""

import json
import os
from importlib.metadata import version

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # this machine has no GPU, and defaults of options ask for a platform

from vllm.entrypoints.common.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parsers():
    """Return vLLM's own parser of its command line, and that of its command ``serve``."""
    top = FlexibleArgumentParser()
    return top, make_arg_parser(top.add_subparsers(dest="subparser").add_parser("serve"))


def fields():
    options = {}
    for action in parsers()[1]._actions:
        choices = None if action.choices is None else sorted(map(str, action.choices))
        for name in action.option_strings:
            if name.startswith("--") and name != "--help" and not name.startswith("--no-"):
                options[name[2:].replace("_", "-")] = choices if choices is None or len(choices) <= 60 else None
    return {"version": version("vllm"), "options": dict(sorted(options.items()))}


if __name__ == "__main__":
    print(json.dumps(fields(), indent=1))
