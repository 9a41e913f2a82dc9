"""YAML of other trainers as plain values, by PyYAML: no tags that make objects, no key twice, no bombs of aliases."""

from __future__ import annotations

from typing import Any

import yaml

from hardware_profiles.strict import Unreadable


class StrictLoader(yaml.SafeLoader):
    """A loader of plain values that refuses repeated keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return a table, or raise an error for a key that stands there twice."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for n, key in enumerate(keys) if key in keys[:n] and key != "<<"), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key '{twice}' stands there twice",
                                                    node.start_mark)  # fmt: skip
        return super().construct_mapping(node, deep)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text; tags that would make objects are refused.

    Raises:
        Unreadable: it is no YAML, or a key of a table stands there twice.
    """
    if text.count("*") > 1000 or len(text) > 1 << 20:  # aliases make a short text a large value
        raise Unreadable(f"it has {len(text):,} characters, or more than 1,000 aliases: give a smaller config")
    try:
        return yaml.load(text, StrictLoader)
    except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
        raise Unreadable(f"it is no YAML: {' '.join(str(error).split())[:200]}") from None
