"""A stand-in for the trainer: the same command line, no torch, ready in a moment.

`write(checkout)` puts it into a checkout as trainer/. Its own settings, given with --set:

    standin.steps     how many steps it takes (default 3)
    standin.interval  seconds between them
    standin.until     stumble only once this file exists
    standin.mode      normal | crash (exit 3 after a step) | deaf (ignores TERM) | family (leaves a child behind) |
                      stumble (saves, then exits 3, unless it was resumed) | oom (runs out of CUDA memory) |
                      hungry (takes 32 MiB a step once RUN/eat exists) | slow-start (hears no signal for a minute)
"""

from __future__ import annotations

from pathlib import Path

MAIN = """\
import json, os, pathlib, signal, subprocess, sys, time

VARIANTS = {"threadwarm": "gated warm-up", "sdpa": "no compile"}
KEYS = {"standin.steps", "standin.interval", "standin.mode", "standin.until", "run.resume", "topology.drafter"}
KEYS |= {"optim.lr", "run.max_steps", "data.token_budget", "data.source", "drafter.init_from"}


def arguments(words):
    found, settings = {}, {}
    while words:
        flag = words.pop(0)
        if flag == "--set":
            key, _, value = words.pop(0).partition("=")
            if key not in KEYS:
                sys.exit(print(f"unknown setting {key!r}", file=sys.stderr) or 2)
            settings[key] = value
        else:
            found[flag] = words.pop(0)
    if found.get("--variant") not in VARIANTS:
        sys.exit(print(f"no variant {found.get('--variant')!r}", file=sys.stderr) or 2)
    return found, settings


def train(found, settings):
    run = pathlib.Path(found["--run-dir"])
    metrics = (run / "metrics.jsonl").open("a", buffering=1)
    emit = lambda event, **rest: print(json.dumps({"event": event, "time": time.time(), **rest}), file=metrics)
    stopped = []
    mode = settings.get("standin.mode", "normal")
    if mode == "slow-start":
        print("importing", flush=True)
        time.sleep(60)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if mode == "deaf" else lambda *_: stopped.append(1))
    emit("start", resumed_from=settings.get("run.resume"))
    print("environment", sorted(os.environ), flush=True)
    if mode == "family":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("child", child.pid, flush=True)
    emit("gate_open", seconds=0.0)
    step, held = 0, []
    for step in range(1, int(settings.get("standin.steps", "3")) + 1):
        emit("step", step=step, loss=1.0 / step, accept_len=1.0 + step, context_tokens_per_s=1000.0)
        print(f"step {step} loss {1.0 / step:.3f}", flush=True)
        if mode == "stumble" and "run.resume" not in settings:
            saved = run / "checkpoints" / f"step-{step:08d}"
            saved.mkdir(parents=True)
            while "standin.until" in settings and not pathlib.Path(settings["standin.until"]).exists():
                time.sleep(0.02)
            sys.exit(3)
        if mode == "hungry" and (run / "eat").exists():
            held.append(bytearray(32 << 20))
        if mode == "oom":
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", flush=True)
            sys.exit(1)
        if mode == "crash":
            print("Traceback (most recent call last): ValueError: bad luck", flush=True)
            sys.exit(3)
        ends_at = time.monotonic() + float(settings.get("standin.interval", "0.02"))
        while time.monotonic() < ends_at and not stopped:
            time.sleep(0.01)
        if stopped:
            break
    saved = run / "checkpoints" / f"step-{step:08d}"
    saved.mkdir(parents=True)
    (saved / "state.json").write_text(json.dumps({"step": step}))
    emit("checkpoint", step=step, path=str(saved), seconds=0.0)
    emit("end", reason="stopped" if stopped else "done", exit_code=0, step=step)


if __name__ == "__main__":
    verb, words = sys.argv[1], sys.argv[2:]
    if verb == "variants":
        for name, text in VARIANTS.items():
            print(name, text)
    elif verb == "config":
        found, settings = arguments(words)
        data, target = {"source": settings.get("data.source", "stdlib")}, {"path": "tiny"}
        print(json.dumps({"variant": found["--variant"], "data": data, "target": target, **settings}))
    elif verb == "export":
        found = dict(zip(words[::2], words[1::2]))
        pathlib.Path(found["--checkpoint"]).resolve(strict=True)
        pathlib.Path(found["--out"]).mkdir(parents=True)
    elif verb == "train":
        train(*arguments(words))
"""


def write(checkout: Path) -> Path:
    """Put the stand-in into `checkout`; returns trainer/."""
    package = checkout / "trainer"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text('"""Stand-in."""\n')
    (package / "__main__.py").write_text(MAIN)
    (package / "data" / "__init__.py").write_text("")
    (package / "data" / "blob.bin").write_bytes(bytes(range(256)) * 512)
    return package
