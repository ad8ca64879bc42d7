"""A Proxmox host to test against, made of real parts: sshd on 127.0.0.1 and LXC containers, nothing downloaded.

A container's root is an overlay of this machine's own root: Python, tmux and the trainer's environment are in it, and
what a test writes there is gone with it. Everything lives under one directory for each run and is ended by pid;
what a killed run has left is swept by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.waiting import PATIENCE_S, wait_until

BASE = Path("/var/tmp")  # on the machine's own filesystem: an overlay cannot sit on an overlay or a tmpfs everywhere
PREFIX = "dflash-sandbox-"
PROGRAMS = ("lxc-start", "lxc-attach", "lxc-stop", "lxc-info", "sshd", "ssh-keygen", "ip")
LXC_CONFIG = """\
lxc.include = /usr/share/lxc/config/common.conf
lxc.arch = linux64
lxc.rootfs.path = dir:{rootfs}
lxc.uts.name = ct{vmid}
lxc.net.0.type = empty
lxc.init.cmd = {init}
lxc.apparmor.profile = unconfined
"""
SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {home}/host_key
AuthorizedKeysFile {home}/authorized_keys
PidFile {home}/sshd.pid
StrictModes no
UsePAM no
UseDNS no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
PrintLastLog no
MaxSessions 10
SetEnv PATH={home}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin HOME={home}/root
LogLevel VERBOSE
"""


def missing() -> str:
    """Why the sandbox cannot run here; empty where it can."""
    if os.geteuid() != 0:
        return "not root"
    if not Path("/etc/debian_version").exists():
        return "not Debian"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    return f"not installed: {', '.join(absent)} (tests/sandbox/install.sh installs them)" if absent else ""


def children(pid: int) -> list[int]:
    """Pids whose parent is `pid`."""
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def descendants(pid: int) -> list[int]:
    """Children and theirs, deepest first."""
    found: list[int] = []
    for child in children(pid):
        found += [*descendants(child), child]
    return found


def send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class Container:
    """One LXC container, known to the stand-in pct under its vmid."""

    lxcpath: Path
    vmid: int
    init: str = "/bin/sleep infinity"

    @property
    def home(self) -> Path:
        return self.lxcpath / str(self.vmid)

    @property
    def rootfs(self) -> Path:
        """The container's files, seen from outside."""
        return self.home / "rootfs"

    def create(self) -> None:
        for name in ("up", "work", "rootfs"):
            (self.home / name).mkdir(parents=True)
        # volatile: nothing here outlives the run, and unmounting must not flush the whole machine's disk.
        layers = f"lowerdir=/,upperdir={self.home}/up,workdir={self.home}/work,volatile"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, str(self.rootfs)], check=True)
        config = LXC_CONFIG.format(rootfs=self.rootfs, vmid=self.vmid, init=self.init)
        if "systemd" in self.init:
            config += "lxc.mount.auto = cgroup:rw:force\n"
        (self.home / "config").write_text(config)
        conf = f"arch: amd64\ncores: 2\nhostname: ct{self.vmid}\nmemory: 4096\nunprivileged: 0\n"
        (self.home / "pve.conf").write_text(conf)

    def lxc(self, program: str, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [program, "-P", str(self.lxcpath), "-n", str(self.vmid), *argv]
        return subprocess.run(
            command, capture_output=True, text=True, check=check, timeout=PATIENCE_S, stdin=subprocess.DEVNULL
        )

    def start(self) -> None:
        self.lxc("lxc-start")
        wait_until(self.running, what=f"container {self.vmid} runs")

    def stop(self) -> None:
        if self.running():
            self.lxc("lxc-stop", "-k")

    def running(self) -> bool:
        return self.lxc("lxc-info", "-s", "-H", check=False).stdout.strip() == "RUNNING"

    def run(self, *argv: str, check: bool = True) -> str:
        """Run a command inside, past the route under test; its stdout."""
        return self.lxc("lxc-attach", "--clear-env", "--", *argv, check=check).stdout

    def pids(self, *needles: str) -> list[int]:
        """Pids (inside) of processes whose command line holds all of the needles."""
        script = (
            "import os, sys\n"
            "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
            "    try:\n"
            "        line = open(f'/proc/{pid}/cmdline').read()\n"
            "    except OSError:\n"
            "        continue\n"
            "    if int(pid) != os.getpid() and all(word in line for word in sys.argv[1:]):\n"
            "        print(pid)\n"
        )
        return [int(line) for line in self.run("/usr/bin/python3", "-c", script, *needles).split()]

    def remove(self) -> None:
        self.stop()
        subprocess.run(["umount", str(self.rootfs)], check=False, capture_output=True)
        _remove(self.home)


@dataclass
class Sshd:
    """An OpenSSH server with its own keys."""

    home: Path
    address: str = "127.0.0.1"
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    def create(self) -> None:
        # A home of its own for what logs in: a login shell reads ~/.bashrc, and that of this machine may take locks,
        # start things, or print. Tests that want such a host write one.
        (self.home / "root").mkdir(parents=True)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.new_host_key()
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.identity)], check=True)
        shutil.copyfile(f"{self.identity}.pub", self.home / "authorized_keys")
        self.port = self.port or _free_port()

    @property
    def identity(self) -> Path:
        return self.home / "user_key"

    @property
    def log(self) -> str:
        return (self.home / "sshd.log").read_text(errors="replace")

    def new_host_key(self) -> None:
        for path in (self.home / "host_key", self.home / "host_key.pub"):
            path.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.home}/host_key"], check=True)

    def known_hosts_line(self, port: int = 0) -> str:
        """Its key; `port` is where a client meets it, where that is not its own."""
        kind, key, *_ = (self.home / "host_key.pub").read_text().split()
        return f"[{self.address}]:{port or self.port} {kind} {key}\n"

    def fingerprint(self) -> str:
        done = subprocess.run(
            ["ssh-keygen", "-l", "-f", f"{self.home}/host_key.pub"], check=True, capture_output=True, text=True
        )
        return done.stdout.split()[1]

    def start(self) -> None:
        config = self.home / "sshd_config"
        config.write_text(SSHD_CONFIG.format(port=self.port, address=self.address, home=self.home))
        self.process = subprocess.Popen(
            ["/usr/sbin/sshd", "-D", "-f", str(config), "-E", f"{self.home}/sshd.log"],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        started = self.process
        wait_until(lambda: (self.home / "sshd.pid").exists() or started.poll() is not None, "sshd listens")
        assert started.poll() is None, self.log

    def sessions(self) -> list[int]:
        """Pids of the server processes, one for each connection."""
        return children(self.process.pid) if self.process else []

    def stop(self) -> None:
        """End the listener and every connection."""
        if self.process is None:
            return
        for pid in [*descendants(self.process.pid), self.process.pid]:
            send(pid, signal.SIGCONT)
            send(pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        (self.home / "sshd.pid").unlink(missing_ok=True)


@dataclass
class Box:
    """The host: sshd, the stand-in pct, and container 200."""

    home: Path
    sshd: Sshd
    containers: dict[int, Container] = field(default_factory=dict)

    @property
    def pct(self) -> Path:
        return self.home / "sbin" / "pct"

    @property
    def container(self) -> Container:
        return self.containers[200]

    def add_container(self, vmid: int, **options: str) -> Container:
        container = Container(self.home / "lxc", vmid, **options)
        self.containers[vmid] = container
        container.create()
        return container

    def settings(self, **changes: object) -> None:
        """Write pct.json: an old version without --keep-env, a failing one."""
        values = {"lxcpath": str(self.home / "lxc"), "node": "pve", "keep_env": True, "fail": "", **changes}
        (self.pct.parent / "pct.json").write_text(json.dumps(values))

    def install_pct(self) -> None:
        self.pct.parent.mkdir(parents=True, exist_ok=True)
        source = (Path(__file__).parent / "standin_pct.py").read_text()
        self.pct.write_text(f"#!{sys.executable} -I\n" + source.partition("\n")[2])
        self.pct.chmod(0o755)
        self.settings()


@contextlib.contextmanager
def box(**sshd_options: str) -> Iterator[Box]:
    """A whole host, up; ended and removed afterwards, also after an error or Ctrl-C."""
    sweep()
    home = Path(tempfile.mkdtemp(prefix=PREFIX, dir=BASE))
    (home / "owner").write_text(f"{os.getpid()} {_start_time(os.getpid())}")
    (home / "lxc").mkdir()
    made = Box(home, Sshd(home / "ssh", **sshd_options))
    try:
        made.install_pct()
        made.add_container(200).start()
        made.sshd.create()
        made.sshd.start()
        yield made
    finally:
        made.sshd.stop()
        for container in made.containers.values():
            container.remove()
        _remove(home)


def sweep() -> None:
    """Remove what runs that no longer live have left: containers, mounts, directories. One at a time on a machine."""
    with (BASE / f"{PREFIX.rstrip('-')}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _sweep()


def _sweep() -> None:
    for home in BASE.glob(f"{PREFIX}*"):
        try:
            pid, start = (home / "owner").read_text().split()
        except (OSError, ValueError):
            continue  # being made just now
        if _start_time(int(pid)) == start:
            continue
        with contextlib.suppress(OSError, ValueError):
            listener = int((home / "ssh" / "sshd.pid").read_text())
            if str(home) in Path(f"/proc/{listener}/cmdline").read_text():
                for process in [*descendants(listener), listener]:
                    send(process, signal.SIGKILL)
        for config in (home / "lxc").glob("*/config"):
            Container(home / "lxc", int(config.parent.name)).remove()
        _remove(home)


def _remove(home: Path) -> None:
    mounts = Path("/proc/self/mounts").read_text()
    if str(home) in mounts:
        raise AssertionError(f"still mounted under {home}: it is left in place")
    shutil.rmtree(home)


def _start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _free_port() -> int:
    """A port that nobody has: none of those that the kernel gives to outgoing connections, which one could take while
    a test has its server down."""
    for port in random.sample(range(20_000, 32_000), 200):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")
