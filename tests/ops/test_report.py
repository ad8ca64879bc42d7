"""The report page: its numbers, its safety, and how it opens in a real browser.

Shown able to fail: with "<" left alone in the payload, `test_hostile_text_stays_text` finds the script it planted;
with the script's `draw()` taken out, the browser tests find no line.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dflash_ops.agent.runs import RunStatus
from dflash_ops.events import Event
from dflash_ops.pages import _facts
from dflash_ops.report import MAX_POINTS, RunPage, charts, render, thin
from tests.waiting import PATIENCE_S

T0 = 1_764_380_000.0
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def run_events(count: int = 400) -> tuple[Event, ...]:
    """A run that was stopped once and resumed, with evaluations and checkpoints."""
    events = [Event("start", T0, {"config": {"variant": "threadwarm", "optim": {"lr": 6e-4}}})]
    events.append(Event("gate_open", T0 + 130, {"seconds": 130.0}))
    for n in range(count):
        step, wave = 10 * (n + 1), math.sin(n * 1.7)
        loss = 1.9 + 4.2 * math.exp(-n / 70) + 0.12 * wave
        values = {
            "step": step,
            "max_steps": 10000,
            "loss": "nan" if n == count // 2 else loss,
            "accept_len": 5.2 - 3.1 * math.exp(-n / 90) + 0.08 * math.cos(n * 2.3),
            "tokens": step * 147456,
            "context_tokens_per_s": 21480 + 260 * wave - (9000 if n % 97 == 0 else 0),
            "block_tokens_per_s": 88100 + 900 * wave,
            "lr": 6e-4 * min(1.0, step / 400) * (0.5 + 0.5 * math.cos(math.pi * step / 10000)),
            "grad_norm": 0.4 + 0.2 * abs(wave),
            "memory_gb": 76.7,
            "queues": {"batches": 2, "hidden": 1 + n % 2},
            "utilization": {"target-0": 0.97, "target-1": 0.96 + 0.01 * wave, "drafter-0": 0.93},
        }
        events.append(Event("step", T0 + 150 + 66.0 * n, values))
        if n % 40 == 39:
            shares = [max(0.0, 0.9 - 0.045 * k - 0.4 * math.exp(-n / 90)) for k in range(15)]
            held_out = {"step": step, "accept_len": 4.9 - 3.0 * math.exp(-n / 90), "by_position": shares}
            events.append(Event("eval", T0 + 160 + 66.0 * n, held_out))
        if n % 100 == 99:
            events.append(Event("checkpoint", T0 + 165 + 66.0 * n, {"step": step, "path": f"checkpoints/step-{step}"}))
    return tuple(events)


def page(**changes: object) -> RunPage:
    values: dict[str, object] = {
        "run_id": "20261129T021402Z-threadwarm-9c1e",
        "state": "training",
        "evidence": "step 4000, 41 s ago",
        "facts": (("variant", "threadwarm"), ("release", "5f0c2a77d1e40b19"), ("gpus", "8 x NVIDIA H200")),
        "events": run_events(),
        "log_tail": "03:01:40 step   4000/10000  loss 1.9012",
    }
    return RunPage(**{**values, **changes})  # type: ignore[arg-type]  # a test's own keywords


def test_every_plot_that_has_numbers_is_there() -> None:
    found = {chart.id: [series.name for series in chart.series] for chart in charts(run_events(50))}
    assert found == {
        "loss": ["loss"],
        "acceptance": ["training", "held-out"],
        "throughput": ["context", "blocks"],
        "queues": ["batches", "hidden"],
        "utilization": ["target-0", "target-1", "drafter-0"],
        "memory": ["fullest device"],
        "gradient": ["grad_norm"],
        "rate": ["lr"],
    }
    assert charts(()) == ()


def test_thinning_keeps_peaks_and_what_is_not_finite() -> None:
    points = [(n, math.sin(n / 500)) for n in range(100_000)]
    points[54_321] = (54_321, 99.0)
    points[77_777] = (77_777, math.nan)
    kept = thin(points, MAX_POINTS)
    assert len(kept) <= MAX_POINTS
    assert (54_321, 99.0) in kept
    assert any(index == 77_777 for index, _ in kept)
    assert [index for index, _ in kept] == sorted(index for index, _ in kept)


def test_the_page_loads_nothing() -> None:
    text = render(page())
    assert "default-src 'none'" in text
    outside = set(re.findall(r"(?:https?:)?//[a-z][^\s\"'<>]*", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert not re.findall(r"<(?:link|img|iframe|script src)", text)


def test_hostile_text_stays_text() -> None:
    hostile = "</script><script>document.title='owned'</script><!--"
    text = render(page(run_id=hostile, log_tail=hostile, facts=((hostile, hostile),), proof=(hostile,)))
    assert hostile not in text
    assert text.count("</script>") == 2


def test_secrets_do_not_reach_the_page() -> None:
    text = render(page(log_tail="HF_TOKEN=Zq9vK3bW7xT1mN5pL8cR", facts=(("url", "https://u:Zq9vK3bW7xT1mN5pL8cR@h"),)))
    assert "Zq9vK3bW7xT1mN5pL8cR" not in text


def test_the_last_word_on_the_balance_is_a_fact() -> None:
    run = RunStatus("r", "training", "step 4, 1 s ago", "threadwarm", "5f0c", 0.0, "/d", "/d/log", "tmux", "s")
    said = [Event("balance", T0 + n, {"step": n, "text": f"word {n}"}) for n in range(2)]
    assert ("balance", "word 1") in _facts("ct200", run, tuple(said))
    assert "balance" not in dict(_facts("ct200", run, ()))


def test_a_run_without_steps_still_has_a_page() -> None:
    assert "@@RUN@@" not in render(page(events=(), state="starting", log_tail=""))


def dump(tmp_path: Path, text: str, view: str = "", *, screenshot: Path | None = None) -> str:
    """The page's document after its script has run in a real browser."""
    assert BROWSER is not None
    file = tmp_path / "report.html"
    file.write_text(text, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    command = [BROWSER, *flags.split(), "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,1900"]
    command += [f"--screenshot={screenshot}"] if screenshot else ["--dump-dom"]
    done = subprocess.run(
        [*command, f"file://{file}#{view}"], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
class TestInBrowser:
    """Opened for real: what the page's own script makes of the data."""

    def test_it_draws_every_line(self, tmp_path: Path) -> None:
        document = dump(tmp_path, render(page()))
        assert 'data-ready="1"' in document
        assert "<title>20261129T021402Z-threadwarm-9c1e</title>" in document
        drawn = dict(re.findall(r'data-series="([^"]+)" d="([^"]*)"', document))
        assert {"loss", "training", "held-out", "context", "blocks", "target-0", "lr"} <= set(drawn)
        assert all(path.count("L") > 5 for path in drawn.values())
        assert drawn["loss"].count("M") == 2, "a value that is not finite must break the line"

    def test_the_address_sets_the_view(self, tmp_path: Path) -> None:
        document = dump(tmp_path, render(page()), "axis=times&log=1&smooth=0&from=600&to=3000&hidden=loss.loss")
        assert 'data-ready="1"' in document
        assert 'data-series="loss"' not in document
        assert 'class="raw"' not in document
        assert re.search(r'text-anchor="middle">\d+m 00s<', document)

    def test_hostile_text_runs_nothing(self, tmp_path: Path) -> None:
        hostile = "</script><img src=x onerror=document.title='owned'><script>document.title='owned'</script>"
        document = dump(tmp_path, render(page(run_id=hostile, log_tail=hostile, facts=(("x", hostile),))))
        assert 'data-ready="1"' in document
        assert "<title>owned" not in document

    def test_an_empty_run(self, tmp_path: Path) -> None:
        document = dump(tmp_path, render(page(events=(), state="starting")))
        assert "has logged no step yet" in document
