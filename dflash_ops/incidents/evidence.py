"""What is known about a run in trouble: texts with line numbers, nothing more.

Everything that can prove a cause is a line of some text: the log, a JSON record, what nvidia-smi or the kernel
said, what this tool saw itself. Keeping evidence as text means that a diagnosis can print its proof, that half a
file is still evidence, and that a recorded case can be replayed (`Evidence.from_bundle`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """Where a line of evidence was read."""

    LOG = "train.log"
    EXIT = "exit.json"
    RUN = "run.json"
    METRICS = "metrics.jsonl"
    GPU = "nvidia-smi"
    KERNEL = "kernel log"
    FACTS = "facts"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of evidence; `number` counts from 1 in the whole file, not in the excerpt."""

    source: Source
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.number}: {self.text}"


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A stretch of one source; `first_line` is the file's line number of its first line."""

    source: Source
    text: str
    first_line: int = 1

    def lines(self) -> Iterator[Line]:
        """The excerpt line by line. A progress bar redraws a line with \\r: each redraw is a line of its own here."""
        for number, raw in enumerate(self.text.split("\n"), self.first_line):
            for part in raw.split("\r"):
                if part.strip():
                    yield Line(self.source, number, part)


_SOURCES = {str(source): source for source in Source}
_SECTION = re.compile(r"^=== (?P<source>[a-z.\- ]+?)(?: from line (?P<first>\d{1,9}))? ===$")


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was read about one run.

    >>> evidence = Evidence.of(log="step 1\\nCUDA out of memory", failure="")
    >>> [str(line) for line in evidence.lines(Source.LOG)]
    ['train.log:1: step 1', 'train.log:2: CUDA out of memory']
    """

    excerpts: tuple[Excerpt, ...]

    @classmethod
    def of(
        cls,
        *,
        log: str = "",
        log_first_line: int = 1,
        exit_record: str = "",
        run_record: str = "",
        metrics: str = "",
        gpu: str = "",
        kernel: str = "",
        facts: str = "",
        failure: str = "",
    ) -> Evidence:
        """Evidence from the usual texts. `failure` is what this tool met: an error's lines, ssh or pct output."""
        texts = {
            Source.LOG: log,
            Source.EXIT: exit_record,
            Source.RUN: run_record,
            Source.METRICS: metrics,
            Source.GPU: gpu,
            Source.KERNEL: kernel,
            Source.FACTS: facts,
            Source.FAILURE: failure,
        }
        return cls(
            tuple(
                Excerpt(source, text, max(log_first_line, 1) if source is Source.LOG else 1)
                for source, text in texts.items()
                if text
            )
        )

    @classmethod
    def from_bundle(cls, bundle: str) -> Evidence:
        """The inverse of `to_bundle`. Text before the first header counts as the log."""
        excerpts: list[Excerpt] = []
        source, first, held = Source.LOG, 1, list[str]()

        def close() -> None:
            if any(line.strip() for line in held):
                excerpts.append(Excerpt(source, "\n".join(held), first))

        for line in bundle.split("\n"):
            header = _SECTION.match(line)
            named = _SOURCES.get(header["source"]) if header else None
            if header is None or named is None:
                held.append(line)
                continue
            close()
            source, first, held = named, max(int(header["first"] or 1), 1), []
        close()
        return cls(tuple(excerpts))

    def to_bundle(self) -> str:
        """One text that holds everything, each source under its own `=== name ===` line."""
        return "\n".join(f"=== {e.source} from line {e.first_line} ===\n{e.text}" for e in self.excerpts)

    def lines(self, source: Source) -> list[Line]:
        """Every line of one source, in order."""
        return [line for excerpt in self.excerpts if excerpt.source is source for line in excerpt.lines()]

    def text(self, source: Source) -> str:
        """The whole text of one source."""
        return "\n".join(excerpt.text for excerpt in self.excerpts if excerpt.source is source)
