"""Files that somebody else wrote: read, or refused with a sentence, never a hang and never a traceback."""

from __future__ import annotations

import io
import os
import re
from pathlib import Path

import pytest

from autopar.cli.terminal import Terminal
from autopar.errors import PlanError
from autopar.planfile import parse
from autopar.words.texts import printable
from hardware_profiles import ProfileError, load_cluster, strict
from hardware_profiles.strict import Unreadable, parse_json, parse_toml, read_text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no valid JSON"),
        ('{"a": 1, "b": {"a": 1, "a": 2}}', "'a' is repeated"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "-Infinity is no number"),
        ('{"a": 1e999}', "larger than any double"),
        ("[" * 70 + "]" * 70, "nested deeper than 64"),
        ("[" * 200_000 + "]" * 200_000, "nested deeper than 64"),
        ("1" * 10_000, r"10,000 characters\) is larger than"),
        (str(2**63), "is larger than"), (f"-{10**40}", "is larger than"), ('["\\ud800"]', "half a character"),
    ],
)
def test_json_that_is_refused(text: str, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        parse_json(text)


def test_json_that_is_read() -> None:
    assert parse_json('{"a": [1, 2.5, null, "ü"]}') == {"a": [1, 2.5, None, "ü"]}
    repeated: list[str] = []
    assert parse_json('{"a": 1, "a": 2}', repeated) == {"a": 2}
    assert repeated == ["a"]


def test_toml_that_is_refused() -> None:
    with pytest.raises(Unreadable, match="no valid TOML"):
        parse_toml("a = 1\na = 2\n")
    with pytest.raises(Unreadable, match="nested deeper"):
        parse_toml("a = " + "[" * 100 + "]" * 100)


def test_too_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "MOST_VALUES", 10)
    with pytest.raises(Unreadable, match="more than 10 values"):
        parse_json(str(list(range(20))))


def test_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "large").write_text("x" * 100)
    monkeypatch.setattr(strict, "LARGEST_FILE_BYTES", 50)
    for name, says in [(".", "a folder"), ("pipe", "a pipe"), ("latin", "no text in UTF-8 .byte 3"),
                       ("large", "100 bytes, at most 50"), ("none", "No such file"), ("a\0b", "null")]:  # fmt: skip
        with pytest.raises(Unreadable, match=says):
            read_text(tmp_path / name)


def test_readers_name_the_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cluster.toml")
    with pytest.raises(ProfileError, match=r"cluster.toml.*\n.*a pipe"):
        load_cluster(tmp_path / "cluster.toml")
    with pytest.raises(PlanError, match="the plan: it is nested deeper"):
        parse("[" * 1000 + "]" * 1000, "the plan")


def test_whole_numbers_of_toml_are_bounded() -> None:
    assert parse_toml(f"a = {2**63 - 1}") == {"a": 2**63 - 1}
    for text in (f"a = {2**63}", f"a = [-{10**40}]", f"[b]\na = {10**70}"):
        with pytest.raises(Unreadable, match="is larger than"):
            parse_toml(text)


def test_counts_are_capped(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[node]]\ncount = 1\nn_devices = 100000000000\ndevice = "h100-sxm"\n')
    with pytest.raises(ProfileError, match="at most 65,536"):
        load_cluster(file)


def test_texts_do_not_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\nü\x07") == "a\\x1b[2Jb\nü\\x07"
    stream = io.StringIO()
    console = Terminal(file=stream, force_terminal=True, width=80, highlight=False)
    console.print("[bold]x[/bold] \x1b]0;title\x07", markup=True)
    written = stream.getvalue()
    assert "\x1b]" not in written and "\\x1b]0;title" in written and "\x1b[1m" in written


READS = re.compile(r"(?<![\w.])open\(|json\.loads?\(|tomllib\.|\bnp\.load\(|\.read_(text|bytes)\(")


RUNS_ELSEWHERE = "autopar/targets/trainers/fsdp2/folder/train.py"
"""A script that is exported as it stands, and runs where autopar is not."""


def test_no_other_reader() -> None:
    """Every file that is given is read by the strict reader; what the kernel writes under /proc needs none."""
    root = Path(strict.__file__).resolve().parents[1]
    folders = ("autopar", "cost_models", "hardware_profiles")
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    wrong = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in paths if path.name != "strict.py" and path.relative_to(root).as_posix() != RUNS_ELSEWHERE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if READS.search(line) and "/proc/" not in line and "O_WRONLY" not in line
    ]  # fmt: skip
    assert not wrong, "read it with hardware_profiles.strict:\n" + "\n".join(wrong)
