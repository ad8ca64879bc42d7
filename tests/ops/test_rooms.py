"""Who may import whom, read from the sources: the order of the rooms that the packages' docstrings draw."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from dflash_ops.bundle import SHARED

ROOT = Path(__file__).parents[2]
OF_THE_RUN = ("assembly", "bench", "cli", "launch", "leader", "outcomes", "pipeline", "stored")
BELOW = {
    "trainer/model": (*OF_THE_RUN, "stages", "parts", "step", "evaluate", "decode", "checkpoint", "memory", "channel"),
    "trainer/data": (*OF_THE_RUN, "stages", "parts", "step", "evaluate", "decode", "checkpoint", "memory", "channel"),
    "trainer/stages": (*OF_THE_RUN, "step", "evaluate", "decode", "model"),
    "trainer/pipeline.py": ("assembly", "bench", "cli", "launch", "stored", "step", "evaluate", "decode", "model"),
}
"""Room -> what it must not know."""


def sources(where: str) -> list[Path]:
    path = ROOT / where
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Full names of all that a module imports, inside functions too; of ours the modules, not the names in them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                place = ROOT / node.module.replace(".", "/") / alias.name
                found = place.is_dir() or place.with_suffix(".py").is_file()
                yield f"{node.module}.{alias.name}" if found else node.module


def all_imports(where: str) -> set[str]:
    return {name for path in sources(where) for name in imported(path)}


def begin(names: set[str], *words: str) -> set[str]:
    return {name for name in names if name.startswith(tuple(f"{word}." for word in words)) or name in words}


def test_the_two_programs_do_not_know_each_other() -> None:
    """Failed with `from dflash_ops.errors import OpsError` in trainer/launch.py."""
    assert not begin(all_imports("trainer"), "dflash_ops", "fabric", "paramiko", "libtmux")
    assert not begin(all_imports("dflash_ops"), "trainer", "torch", "transformers")


def test_the_agent_knows_only_what_is_shipped_with_it() -> None:
    """Failed with an import of `dflash_ops.settings` in agent/gate.py."""
    shared = {f"dflash_ops.{Path(name).stem}" for name in SHARED} | {"dflash_ops"}
    names = begin(all_imports("dflash_ops/agent") | all_imports("dflash_ops/incidents"), "dflash_ops")
    names |= begin({name for module in SHARED for name in imported(ROOT / "dflash_ops" / module)}, "dflash_ops")
    assert not names - shared - begin(names, "dflash_ops.agent", "dflash_ops.incidents")


@pytest.mark.parametrize("room", BELOW)
def test_a_room_does_not_know_the_rooms_above_it(room: str) -> None:
    """Failed for trainer/model while TargetFacts lay in trainer/memory.py."""
    assert not begin(all_imports(room), *(f"trainer.{name}" for name in BELOW[room]))


@pytest.mark.parametrize("package", ["trainer", "dflash_ops", "benchmarks"])
def test_no_module_imports_itself_by_a_detour(package: str) -> None:
    """Failed while trainer/data/rows.py and sources.py imported each other. CycleError names the modules."""
    graph = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): begin(
            set(imported(path)), package
        )
        - {package}
        for path in sources(package)
    }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("package", ["trainer", "dflash_ops"])
def test_the_map_of_a_package_names_every_module(package: str) -> None:
    """Failed with `resume` left out of trainer's."""
    said = set(re.findall(r"\w+", ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""))
    there = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" and path.stem != "__init__"}
    assert there <= said
