"""Stands for requests: every address is an archive of a small citation graph in the format of Cora."""

from __future__ import annotations

import contextlib
import io
import random
import tarfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any


def _graph(papers: int = 2000, words: int = 24, citations: int = 4000) -> dict[str, str]:
    draw = random.Random(3)
    content = [
        " ".join([str(i), *(str(int(draw.random() < 0.3)) for _ in range(words)), f"class{i % 5}"])
        for i in range(papers)
    ]
    cites = [f"{draw.randrange(papers)} {draw.randrange(papers)}" for _ in range(citations)]
    return {"cora/cora.content": "\n".join(content), "cora/cora.cites": "\n".join(cites)}


@contextlib.contextmanager
def get(url: str, **kwargs: Any) -> Iterator[SimpleNamespace]:
    """A response of which ``raw`` is the archive."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in _graph().items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    archive.seek(0)
    yield SimpleNamespace(raw=archive)
