"""Every public name stands in the reference, once; ``make docs`` builds it, and takes a warning for an error."""

from __future__ import annotations

import re
from pathlib import Path

import autopar

PAGES = Path(__file__).resolve().parents[2] / "docs" / "reference"


def test_public_names() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.rst")))
    named = re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(autopar.__all__)
