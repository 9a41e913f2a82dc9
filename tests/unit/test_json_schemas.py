"""What commands print with ``--json``: every command has a schema, every answer is of it, docs/json.md shows it."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import command, plan_all
from typer.main import get_command

from autopar import cli
from autopar.cli.exit_codes import EXIT_CODES, wants_json
from autopar.cli.schemas import ANSWERS
from autopar.cli.schemas.loading import SchemaError, fields_of, forms_in, load_answer

ROOT = Path(__file__).resolve().parents[2]
PIPE = ("-c", "local-x2", "--stages", 2, "--microbatches", 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = {"plan": ("-c", "local-x2", "-m", "tensor=2"), "pipe": PIPE}
    return plan_all(tmp_path_factory.mktemp("json"), kinds)


NET, PLAN, PIPED = "net.py:make", "plan.json", "pipe.json"
COMMANDS: dict[str, tuple[object, ...]] = {
    "plan": ("plan", NET, "-c", "local-x2", "--top", 3, "--like", "tp=2", "--like", "dp=2,mbs=99"),
    "fits": ("fits", NET, "-c", "local-x2", "--like", "dp=2,mbs=4", "--memory-limit", "120KiB"),
    "fits yes": ("fits", NET, "-c", "local-x2", "--like", "dp=2,mbs=4"),
    "check": ("check", PLAN, "--trust"),
    "check pipe": ("check", PIPED, "--trust"),
    "show": ("show", PLAN, "--trust"),
    "show all": ("show", PIPED, "--trust", "--all", "--stage", 1),
    "show pipe": ("show", PIPED, "--trust"),
    "show code": ("show", PLAN, "--trust", "--code"),
    "show untrusted": ("show", PLAN),
    "simulate": ("simulate", PIPED, "--trust"),
    "memory": ("memory", PIPED, "--trust"),
    "explain": ("explain", PLAN, "layers.1.up", "--trust", "--instead", "tensor=n"),
    "explain cut": ("explain", PIPED, "stage:1", "--trust"),
    "diff": ("diff", PLAN, PIPED, "--trust"),
    "inspect": ("inspect", NET, "--verify", "--graph"),
    "inspect passes": ("inspect", NET, "--passes"),
    "inspect dump": ("inspect", NET, "--dump-after", "selected_rows"),
    "verify": ("verify", NET, "-m", "tensor=2"),
    "devices": ("devices",),
    "clusters": ("clusters",),
    "new cluster": ("clusters", "new", "--gpu", "A100-SXM-40GB", "--nodes", 4, "--network", "200Gb/s"),
    "launch": ("launch", PIPED),
    "reshard": ("reshard", PLAN, PIPED, "--trust"),
    "error": ("plan", NET, "-c", "no-such-cluster"),
}
"""Commands of every schema that need no processes; others are held to theirs where they are tested."""


@pytest.mark.parametrize("name", COMMANDS)
def test_answers_are_of_their_schema(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the strict loader refuses the answer with any key added, left out, or of another type."""
    monkeypatch.chdir(folder)
    _, out, err = command(*COMMANDS[name], "--json")  # loads it
    assert out, err
    document = json.loads(out)
    assert document["schema"].startswith("autopar.") and document["schema"].endswith("/1")
    for wrong, path in mutations(document):
        with pytest.raises(SchemaError) as error:
            load_answer(wrong)
        assert path.removeprefix(".") in str(error.value)


def mutations(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """A document with one mistake in every object that a schema describes, and where it is."""
    form = ANSWERS[document["schema"].removeprefix("autopar.").partition("/")[0]].form
    for path, found, fields in described(form, document, ()):
        for field in fields:
            if field.rest is None and field.key in found:
                for change in ("absent", "wrong"):
                    if change == "absent" and not field.required:
                        continue
                    wrong = copy.deepcopy(document)
                    inside: Any = wrong
                    for step in path:
                        inside = inside[step]
                    if change == "absent":
                        del inside[field.key]
                    elif field.kind is Any or "Any" in str(field.kind):
                        continue
                    else:
                        inside[field.key] = object()
                    yield wrong, field.key
        if not any(field.rest for field in fields):
            wrong = copy.deepcopy(document)
            inside = wrong
            for step in path:
                inside = inside[step]
            inside["of_nobody"] = 1
            yield wrong, "of_nobody"


def described(form: type, value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """The first object of every dataclass in a document."""
    seen: set[type] = set()

    def walk(form: type, value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
        if form in seen or not isinstance(value, dict):
            return
        seen.add(form)
        fields = fields_of(form)
        yield path, value, fields
        for field in fields:
            inner = [f for f in forms_in_kind(field.kind)]
            at = (*path, field.key)
            item = value.get(field.key)
            for of_field in inner[:1]:
                if isinstance(item, list) and item:
                    yield from walk(of_field, item[0], (*at, 0))
                elif isinstance(item, dict) and "dict[" in str(field.kind) and item:
                    first = next(iter(item))
                    yield from walk(of_field, item[first], (*at, first))
                elif isinstance(item, dict):
                    yield from walk(of_field, item, at)

    yield from walk(form, value, path)


def forms_in_kind(kind: Any) -> list[type]:
    """The dataclasses in a type."""
    return list(forms_in(kind))


def test_every_command_with_json_has_a_schema() -> None:
    """A new command with ``--json`` needs a dataclass under ``answer(name, "autopar COMMAND")``."""
    commands = {}

    def walk(group: Any, prefix: str) -> None:
        for name, each in group.commands.items():
            if hasattr(each, "commands"):
                walk(each, f"{prefix} {name}")
            elif any("--json" in parameter.opts for parameter in each.params):
                commands[f"{prefix} {name}"] = each

    walk(get_command(cli.app), "autopar")
    said = [words for schema in ANSWERS.values() for words in schema.made_by]
    assert {name for name in commands if not any(re.match(rf"{name}\b", words) for words in said)} == set()
    assert len(commands) >= 13


def test_every_answer_names_its_schema() -> None:
    """Every call of print_json says which schema it prints, and every schema is printed."""
    named = set()
    for path in sorted((ROOT / "autopar" / "cli").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print_json":
                given = [*node.args[1:], *(k.value for k in node.keywords if k.arg == "schema")]
                assert given, f"{path.relative_to(ROOT)}:{node.lineno}: print_json without a schema"
                if isinstance(given[0], ast.Constant):
                    named.add(given[0].value)
    assert named == set(ANSWERS)


def test_fields_are_described() -> None:
    """By their annotation, or by a name that says all."""
    for schema in ANSWERS.values():
        for form in forms_in(schema.form):
            assert (inspect.getdoc(form) or "").endswith((".", ":", "asked for.")), form
            bare = [f.key for f in fields_of(form) if not f.text]
            assert len(bare) <= 3, (form, bare)


def test_the_page_is_that_of_the_schemas() -> None:
    """Made anew by python benchmarks/json_page.py."""
    spec = importlib.util.spec_from_file_location("json_page", ROOT / "benchmarks" / "json_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "json.md").read_text(encoding="utf-8") == module.page()


@pytest.mark.parametrize(
    "text, said",
    [
        ("{", "no valid JSON"), ("[]", "no key 'schema'"), ('{"schema": 3}', "no key 'schema'"),
        ('{"schema": "autopar.fit/1"}', "did you mean 'fits'"), ('{"schema": "fits/1"}', "is unknown"),
        ('{"schema": "autopar.fits/2"}', "has version 2, this autopar reads autopar.fits/1"),
        ('{"schema": "autopar.devices/1", "devices": [{"name": 3}]}', "devices[0].name: 3 is not a text"),
        ('{"schema": "autopar.clusters/1", "clusters": {}}', "clusters: {} is not a list of objects ClusterEntry"),
    ],
)  # fmt: skip
def test_documents_that_are_no_answers(text: str, said: str) -> None:
    with pytest.raises(SchemaError) as error:
        load_answer(text)
    assert said in str(error.value)


def test_types() -> None:
    """A whole number is a number, true is none, and null only where it may be."""
    entry = {"name": "a", "devices": 1, "nodes": 1, "kinds": {"b": 1}, "description": ""}

    def loaded(**changed: Any) -> Any:
        return load_answer({"schema": "autopar.clusters/1", "clusters": [{**entry, **changed}]})

    assert loaded().clusters[0].kinds == {"b": 1}
    for wrong in ({"devices": True}, {"devices": 1.0}, {"devices": None}, {"kinds": {"b": "c"}}, {"kinds": []}):
        with pytest.raises(SchemaError, match=next(iter(wrong))):
            loaded(**wrong)
    answered = load_answer({"schema": "autopar.diff-profiles/1", "notes": [],
                            "rows": [{"what": "a", "a_seconds": 1, "b_seconds": 2.5}]})  # fmt: skip
    assert answered.rows[0].a_seconds == 1.0 and isinstance(answered.rows[0].a_seconds, float)


# --- exit codes ------------------------------------------------------------------------------------------------------


def failed(*words: object) -> tuple[int, dict[str, Any], str]:
    """Exit code, the failure of standard output, and standard error."""
    code, out, err = command(*words)
    return code, json.loads(out)["error"], err


def test_errors_are_json_with_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is on standard error as well, and without ``--json`` there alone."""
    monkeypatch.chdir(folder)
    code, error, err = failed("fits", NET, "-c", "local-x2", "--like", "tp=2,foo=1", "--json")
    assert code == error["exit_code"] == 2 and error["kind"] == "PlanError"
    assert "'foo=1' is no word of a layout" in error["message"] and error["message"] in err
    code, out, err = command("fits", NET, "-c", "local-x2", "--like", "tp=2,foo=1")
    assert code == 2 and out == "" and "'foo=1' is no word" in err
    code, error, _ = failed("fits", NET, "--json")
    assert code == 2 and error["kind"] == "UsageError" and "--cluster" in error["message"]
    code, error, _ = failed("no-such-command", "--json")
    assert code == 2 and error["kind"] == "UsageError"
    (folder / "wrong.toml").write_text('[[node]]\ndevice = "nothing"\nn_devices = -1\n')
    code, error, _ = failed("clusters", "wrong.toml", "--json")
    assert code == 2 and len(error["failures"]) >= 2


def test_a_defect_is_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would end with 1, which is the exit code of a no."""
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr("hardware_profiles.list_devices", broken)
    code, error, err = failed("devices", "--json")
    assert code == error["exit_code"] == 3 and error["kind"] == "Defect"
    assert "ZeroDivisionError: nothing to divide" in error["message"] and "Traceback" in err and "report it" in err
    assert command("devices")[:2] == (3, "")


def test_ended_by_hand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hardware_profiles.list_devices", interrupted)
    code, error, _ = failed("devices", "--json")
    assert code == error["exit_code"] == 130 and error["kind"] == "Interrupted"


def test_a_question_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def asking(*_: object, **__: object) -> None:
        raise EOFError

    monkeypatch.setattr("hardware_profiles.list_devices", asking)
    code, error, _ = failed("devices", "--json")
    assert code == 2 and "standard input ended" in error["message"]


def test_exit_codes_are_in_every_help() -> None:
    for words in [(), ("clusters", "new"), *((name,) for name in get_command(cli.app).commands)]:  # type: ignore[attr-defined]
        code, out, _ = command(*words, "--help")
        text = " ".join(out.split())
        assert code == 0 and all(f"{number} {said}" in text for number, said in EXIT_CODES.items()), words


def test_which_words_ask_for_json() -> None:
    assert wants_json(["fits", "--json"]) and not wants_json(["fits"]) and not wants_json(["plan", "--", "--json"])


# --- layouts beside a plan -------------------------------------------------------------------------------------------


def test_alternatives_have_reasons(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ("plan", NET, "-c", "local-x2", "--memory-limit", "120KiB", "--like", "tp=2", "--like", "dp=2,mbs=4",
             "--like", "dp=2,mbs=99", "--top", 3)  # fmt: skip
    answered = load_answer(command(*words, "--json")[1])
    rows = {row.layout: row for row in answered.alternatives}
    assert [row.rank for row in answered.alternatives] == list(range(1, len(rows) + 1))
    slower = rows["tp=2"]
    assert slower.refused is None and re.fullmatch(r"[\d.]+ times the best: [\d.]+ ms more collectives of activations",
                                                   slower.reason)  # fmt: skip
    refused = rows["dp=2,mbs=4"]
    assert refused.reason == "refused: 177.4 of 120.0 KiB, optimizer" and refused.refused is not None
    assert refused.refused.needed_bytes > refused.refused.limit_bytes == 120 * 2**10
    assert refused.refused.largest == "optimizer" and 0 < refused.refused.largest_bytes < refused.refused.needed_bytes
    impossible = rows["dp=2,mbs=99"]
    assert impossible.seconds is None and impossible.error is not None and "mbs=99" in impossible.error
    assert list(rows)[-2:] == ["dp=2,mbs=4", "dp=2,mbs=99"], "those that fit come first, impossible ones last"
    assert answered.plan_file["autopar_plan"] == 2 and len(rows) > 3, "of the search too"
    text = command(*words)[1]
    assert "refused: 177.4 of 120.0 KiB, optimizer" in text and slower.reason in text


def test_a_plan_with_alternatives_is_a_plan_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    _, out, _ = command("plan", NET, "-c", "local-x2", "--top", 2, "--json")
    (folder / "with.json").write_text(out)
    assert command("check", "with.json", "--trust")[0] == 0
