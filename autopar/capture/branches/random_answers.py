"""Python's questions for the value of a random number in a trace, and the answers that were chosen before.

The question stays in the trace, as an operator ``autopar::ask`` with its condition, where it was asked, and the answer.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import NamedTuple

import torch

from autopar.capture.python.bytecode import place_in
from autopar.capture.python.user_lines import is_users, user_line
from autopar.capture.trace.recording import under_way
from autopar.errors import CaptureError

ASK = "autopar.ask.default"


class Question(NamedTuple):
    """One time that Python code asks for a random number.

    Attributes:
        module: path of the module whose code asks.
        site: ``file.py:12@8-31``: line and columns of the question.
        number: the number of questions before it in the trace.
    """

    module: str
    site: str
    number: int

    @property
    def line(self) -> str:
        """File and line of the question."""
        return self.site.partition("@")[0]

    @property
    def where(self) -> str:
        """Module, file and line of the question."""
        return f"'{self.module or '<model>'}' at {self.line}"


def truth(tensor: torch.Tensor, numbers: str, name: str) -> torch.Tensor:
    """Return ``bool [ ]`` of a tensor of one element; ``numbers`` and ``name`` are what the error calls them."""
    if tensor.numel() != 1:
        raise CaptureError(
            f"forward asks whether a tensor of {tensor.numel()} {numbers} is true, at "
            f"{site_of().partition('@')[0]}: only one number has a truth value\n  ask for one: "
            f"{name}.any(), {name}.all(), {name}[0]"
        )
    condition = (tensor.detach() if tensor.requires_grad else tensor).reshape(())
    return condition if condition.dtype == torch.bool else condition != 0


def ask(tensor: torch.Tensor) -> bool:
    """Return the answer that Python is given to ``bool(tensor)``, a random number of one element."""
    condition = truth(tensor, "random numbers", "draws")
    site = site_of()
    now = under_way()
    assert now is not None
    answer = now.answer(now.asked, site)
    now.asked += 1
    torch.ops.autopar.ask(condition, site, answer)
    return answer


def site_of() -> str:
    """Return the innermost place in the user's code: line and columns of the question (``file.py:12@8-31``)."""
    frame = users_frame()
    if frame is None:
        return "an unknown place@0"
    line, begin, end = place_in(frame)
    return f"{frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line}@{begin}-{end}"


def users_frame() -> FrameType | None:
    """Return the innermost frame of the user's code; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def plain_path(path: str) -> str:
    """Return the path of a module in a trace, without the names that ``torch.export`` has for its root."""
    for root in ("L['self']", "_export_root"):
        path = path.replace(f"{root}.", "").replace(root, "")
    return path


def refused(what: str, drawn: str = "") -> CaptureError:
    """Return the error for a random number whose value Python needs."""
    return CaptureError(
        f"forward asks for the value of a random number{f' ({drawn})' if drawn else ''} in Python, at "
        f"{user_line(sys._getframe(1)) or 'an unknown place'}, {what}: a program would use the same one at every step"
        "\n  compute with the tensor itself (torch.where(torch.rand(()) < p, x, layer(x))), compare it in an if, whose "
        "both sides are kept then, or turn it off (layerdrop=0)"
    )


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_LIBRARY.define("ask(Tensor condition, str site, bool answer) -> ()")
torch.library.register_fake("autopar::ask", lambda *_: None, lib=_LIBRARY)
torch.fx.node.has_side_effect(torch.ops.autopar.ask.default)
