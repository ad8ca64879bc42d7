"""Every error and incident leads to a page, and every page is whole.

That the commands of a page work is shown by the drills (tests/sandbox/test_drills.py).

Shown able to fail: with `--lines` misspelt in one fence, `test_fab_commands_exist` fails.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from dflash_ops import care, errors, reading, tasks
from dflash_ops.cli import ns
from dflash_ops.incidents import CATALOGUE, Incident
from tests.runbook import PLACES, ROOT, SECTIONS, Fence, fences, pages

ROUTINE = [
    "first-set-up",
    "launch",
    "stop-and-resume",
    "roll-back",
    "change-variant",
    "replace-a-gpu",
    "upgrade-torch",
    "add-a-host",
    "move-checkpoints",
]


def error_classes(base: type[errors.OpsError] = errors.OpsError) -> list[type[errors.OpsError]]:
    return [base, *(found for child in base.__subclasses__() for found in error_classes(child))]


def test_whoever_names_a_page_finds_it() -> None:
    named = {kind.runbook for kind in error_classes() if kind.runbook} | {i.runbook for i in CATALOGUE} | set(ROUTINE)
    assert named == {path.stem for path in pages()}


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_a_page_is_whole(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == SECTIONS
    assert re.match(r"# [A-Z/]", text)
    for body in re.split(r"^## .+$", text, flags=re.MULTILINE)[1:]:
        assert len(body.strip()) > 20, "an empty part helps nobody"
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_every_block_says_where_it_runs(path: Path) -> None:
    assert not re.findall(r"^```(?!sh (?:laptop|host|container)\b)\S", path.read_text(encoding="utf-8"), re.MULTILINE)
    found = fences(path)
    assert {fence.section for fence in found} >= {"How to confirm", "Verify"}
    for fence in found:
        assert fence.place in PLACES
        assert fence.place == "laptop" or "fab " not in fence.script
        assert fence.place != "laptop" or "pct " not in fence.script


@pytest.mark.parametrize("path", [*pages(), ROOT / "runbooks" / "README.md"], ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / link).is_file(), link


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "runbooks" / "README.md").read_text(encoding="utf-8")
    for path in pages():
        assert f"]({path.name})" in index, path.name


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_shell_blocks_parse(path: Path) -> None:
    for fence in fences(path):
        fence.check_syntax()


def test_the_reader_of_pages_reads() -> None:
    found = fences(ROOT / "runbooks" / "container-stopped.md")
    assert found[0] == Fence("How to confirm", "laptop", 'fab -H "$NAME" status', 13, runs=True)


def fab_commands(script: str) -> list[list[str]]:
    """Every call of fab in a block, as words."""
    lines = re.sub(r"\\\n", " ", script).splitlines()
    return [shlex.split(line) for line in lines if line.startswith("fab ")]


def check_words(words: list[str]) -> None:
    """Raise AssertionError where a verb or a flag does not exist. A flag belongs to the verb before it."""
    rest = words[1:]
    if rest[:1] == ["-H"]:
        rest = rest[2:]
    if rest == ["--list"]:
        return
    flags: dict[str, bool] = {}
    positional = 0
    assert rest, words
    assert rest[0] in VERBS, f"no verb {rest[0]!r}: {words}"
    while rest:
        word = rest.pop(0)
        if word in VERBS:
            arguments = VERBS[word]
            flags = {f"--{name}": argument.takes_value for argument in arguments for name in argument.names}
            positional = sum(argument.positional for argument in arguments)
        elif word.startswith("--"):
            assert word in flags, f"no flag {word!r}: {words}"
            if flags[word]:
                assert rest, words
                rest.pop(0)
        else:
            positional -= 1
            assert positional >= 0, f"no verb {word!r}: {words}"


assert all((care.diagnose, reading.status, tasks.deploy))  # importing a module adds its verbs to the namespace
VERBS = {name: ns[name].get_arguments() for name in ns.task_names}


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.stem)
def test_fab_commands_exist(path: Path) -> None:
    for fence in fences(path):
        for words in fab_commands(fence.script):
            check_words(words)


@pytest.mark.parametrize("incident", CATALOGUE, ids=lambda incident: incident.name)
def test_next_commands_exist(incident: Incident) -> None:
    check_words(incident.next_command.split())


@pytest.mark.parametrize("kind", error_classes(), ids=lambda kind: kind.__name__)
def test_hints_name_commands_that_exist(kind: type[errors.OpsError]) -> None:
    for command in re.findall(r"`(fab [^`]+)`", kind.default_hint):
        check_words(command.split())


@pytest.mark.parametrize("words", ["fab lunch", "fab launch --line 3", "fab status now", "fab -H x runs --resume y"])
def test_the_check_of_commands_can_fail(words: str) -> None:
    with pytest.raises(AssertionError):
        check_words(words.split())
