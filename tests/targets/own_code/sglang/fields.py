"""Print the options of SGLang's server as its own parser has them, as JSON: names, and values where they are few."""

import argparse
import json
from importlib.metadata import version

from sglang.srt.server_args import ServerArgs


def parser():
    """Return SGLang's own parser of its command line."""
    found = argparse.ArgumentParser()
    ServerArgs.add_cli_args(found)
    return found


def fields():
    options = {}
    for action in parser()._actions:
        choices = None if action.choices is None else sorted(map(str, action.choices))
        for name in action.option_strings:
            if name.startswith("--") and name != "--help":
                options[name[2:]] = choices if choices is None or len(choices) <= 60 else None
    return {"version": version("sglang"), "options": dict(sorted(options.items()))}


if __name__ == "__main__":
    print(json.dumps(fields(), indent=1))
