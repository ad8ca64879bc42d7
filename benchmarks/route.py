"""What the route costs: `fab deploy launch` of an unchanged release against the same work typed by hand.

    python -m benchmarks.route [--delay-ms 50] [--rounds 3] [--trainer standin|real]     as root on Debian

Both run in one process, turn about, over the same wire: the laptop in a network namespace of its own, the delay on
every packet in each direction, a real sshd, a real LXC container. The hand-typed sequence is eight OpenSSH calls:
two copies, two syntax checks, nvidia-smi, ps, removal of the compile cache, launch under tmux. It checks less: no hash,
no lock, no record of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.sandbox import box as sandbox
from tests.sandbox import network as networks
from tests.sandbox.laptop import Laptop

GOAL_RATIO = 0.5
GOAL_CHANNELS = 4


@dataclass(frozen=True)
class Result:
    """Seconds are medians over the rounds."""

    delay_ms: float
    trainer: str
    rounds: int
    fab_s: float
    by_hand_s: float
    ratio: float
    fab_channels: int
    fab_logins: int
    by_hand_channels: int
    new_line_s: float
    """From a line's writing in the container to its appearance at the laptop, with tail-log following, no delay."""
    backlog_mb_per_s: float
    """Log bytes through `tail-log --no-follow`, no delay."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.route")
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trainer", choices=("standin", "real"), default="standin")
    options = parser.parse_args()
    reason = sandbox.missing() or networks.missing()
    if reason:
        print(f"route: skipped ({reason})")
        return 0
    result = measure(options.delay_ms, options.rounds, options.trainer)
    print(json.dumps(asdict(result), indent=2))
    ratio_met, channels_met = result.ratio <= GOAL_RATIO, result.fab_channels <= GOAL_CHANNELS
    print(f"ratio {result.ratio:.2f} (goal {GOAL_RATIO}: {'met' if ratio_met else 'MISSED'})")
    print(f"channels {result.fab_channels} (goal {GOAL_CHANNELS}: {'met' if channels_met else 'MISSED'})")
    return 0


def measure(delay_ms: float, rounds: int, trainer: str) -> Result:
    """Bring everything up, take turns, and take it down."""
    with (
        networks.network() as net,
        sandbox.box(address=net.host_address) as box,
        tempfile.TemporaryDirectory(prefix="dflash-bench-") as home,
    ):
        laptop = FarLaptop(Path(home), box, "bench", place=net.laptop)
        (laptop.real_trainer if trainer == "real" else laptop.standin_trainer)()
        steps = "run.max_steps=100000" if trainer == "real" else "standin.steps=1000000"
        launch = ("deploy", "launch", "--variant", "sdpa", "--set", steps)
        try:
            laptop.expect(*launch)  # the release and the agent are there from now on
            new_line_s = laptop.new_line_s() if trainer == "standin" else float("nan")
            backlog = laptop.backlog_mb_per_s() if trainer == "standin" else float("nan")
            laptop.end_run()
            fab, hand, channels, logins, hand_channels = [], [], 0, 0, 0
            for _ in range(rounds):
                net.wire.delay_s = delay_ms / 1000
                sessions, before = laptop.sessions(), laptop.logins()
                begin = time.monotonic()
                laptop.expect(*launch)
                fab.append(time.monotonic() - begin)
                channels, logins = laptop.sessions() - sessions, laptop.logins() - before
                net.wire.delay_s = 0.0
                laptop.end_run()
                net.wire.delay_s = delay_ms / 1000
                sessions = laptop.sessions()
                begin = time.monotonic()
                by_hand(laptop)
                hand.append(time.monotonic() - begin)
                hand_channels = laptop.sessions() - sessions
                net.wire.delay_s = 0.0
            return Result(
                delay_ms=delay_ms,
                trainer=trainer,
                rounds=rounds,
                fab_s=round(statistics.median(fab), 2),
                by_hand_s=round(statistics.median(hand), 2),
                ratio=round(statistics.median(fab) / statistics.median(hand), 3),
                fab_channels=channels,
                fab_logins=logins,
                by_hand_channels=hand_channels,
                new_line_s=round(new_line_s, 3),
                backlog_mb_per_s=round(backlog, 1),
            )
        finally:
            net.wire.delay_s = 0.0
            laptop.end_everything()


class FarLaptop(Laptop):
    """A laptop in a network namespace of its own, with what the measurements need."""

    def expect(self, *words: str) -> str:
        done = self.fab(*words, timeout=300)
        if done.returncode != 0:
            raise SystemExit(f"fab {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout

    def end_run(self) -> None:
        """Stop the run, past the route under test."""
        self.expect("stop", "--kill", "--wait", "30")

    def sessions(self) -> int:
        return self.box.sshd.log.count("Starting session")

    def logins(self) -> int:
        return self.box.sshd.log.count("Accepted publickey")

    def log(self) -> Path:
        status = json.loads(self.expect("status", "--json"))
        return Path(f"{self.box.container.rootfs}{status['run']['log']}")

    def new_line_s(self, count: int = 20) -> float:
        """Median time from writing a line to reading it from `tail-log`."""
        log = self.log()
        follower = self.start_fab("tail-log", "--lines", "0", "--raw", stderr=subprocess.DEVNULL)
        assert follower.stdout is not None
        follower.stdout.readline()  # it follows now
        times = []
        for number in range(count):
            mark = f"mark {number} {time.monotonic_ns()}\n".encode()
            begin = time.monotonic()
            with log.open("ab") as file:
                file.write(mark)
            while mark not in follower.stdout.readline():
                pass
            times.append(time.monotonic() - begin)
        follower.kill()
        return statistics.median(times)

    def backlog_mb_per_s(self, megabytes: int = 300) -> float:
        log = self.log()
        with log.open("ab") as file:
            block = (b"x" * 99 + b"\n") * 10_000
            for _ in range(megabytes):
                file.write(block)
        begin = time.monotonic()
        size = 0
        follower = self.start_fab("tail-log", "--no-follow", "--lines", "all", "--raw", stderr=subprocess.DEVNULL)
        assert follower.stdout is not None
        while piece := follower.stdout.read(1 << 20):
            size += len(piece)
        follower.wait(60)
        return size / 1e6 / (time.monotonic() - begin)


def by_hand(laptop: Laptop) -> None:
    """The eight calls, as the operators typed them; each is a connection of its own."""
    sshd, pct = laptop.box.sshd, laptop.box.pct
    ssh = [
        *("ssh", "-F", "/dev/null", "-i", str(sshd.identity), "-p", str(sshd.port)),
        *("-o", f"UserKnownHostsFile={laptop.known_hosts}", "-o", "BatchMode=yes", f"root@{sshd.address}"),
    ]
    inside = f"{pct} exec 200 --"
    files = [laptop.checkout / "trainer" / "__init__.py", laptop.checkout / "trainer" / "__main__.py"]
    session = f"hand{time.monotonic_ns()}"
    for file in files:
        _typed(laptop, [*ssh, f"{inside} sh -c 'cat >/root/{file.name}'"], file.read_bytes())
    for file in files:
        _typed(laptop, [*ssh, f"{inside} {sys.executable} -m py_compile /root/{file.name}"])
    _typed(laptop, [*ssh, f"{inside} nvidia-smi"])
    _typed(laptop, [*ssh, f"{inside} ps aux"])
    _typed(laptop, [*ssh, f"{inside} rm -rf /tmp/torchinductor_root"])
    _typed(laptop, [*ssh, f"{inside} tmux new-session -d -s {session} sleep 60"])


def _typed(laptop: Laptop, argv: list[str], stdin: bytes = b"") -> None:
    done = subprocess.run([*laptop.elsewhere, *argv], input=stdin, capture_output=True, check=False, timeout=120)
    absent = b"nvidia-smi" in argv[-1].encode()  # a machine without GPUs has none: the call still costs its time
    if done.returncode != 0 and not absent:
        raise SystemExit(f"{argv[-1]} ended with {done.returncode}: {done.stderr.decode(errors='replace')}")


if __name__ == "__main__":
    sys.exit(main())
