#!/usr/bin/env python3
"""Stands in for Proxmox's pct on a machine without Proxmox; what it does not do, no test may rely on.

What it copies from the real tool, because a caller can trip over each of these:
- options are parsed as Perl's Getopt::Long does: anywhere between the arguments, abbreviated, with one dash or two,
  until the first `--`, which is swallowed;
- PATH is reset to /sbin:/bin:/usr/sbin:/usr/bin and handed on, with the caller's whole environment, unless
  `--keep-env 0`;
- `exec` replaces itself by lxc-attach with argv untouched: no shell, the command's own exit code;
- a stopped or unknown container, a bad option, a lock: pct's own words and exit codes;
- `push` writes in place, ignores short writes, and ends with 0 when its worker failed.

Settings: `pct.json` beside this file: {"lxcpath": DIR, "node": NAME, "keep_env": BOOL, "fail": TEXT}. A container is a
directory DIR/VMID that holds `config` (LXC's) and `pve.conf` (`key: value` lines).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

SETTINGS = json.loads((Path(__file__).resolve().parent / "pct.json").read_text())
LXCPATH = Path(SETTINGS["lxcpath"])
USAGE = {
    "exec": "pct exec <vmid> [<extra-args>] [OPTIONS]",
    "status": "pct status <vmid> [OPTIONS]",
    "list": "pct list",
    "config": "pct config <vmid> [OPTIONS]",
    "start": "pct start <vmid> [OPTIONS]",
    "stop": "pct stop <vmid> [OPTIONS]",
    "push": "pct push <vmid> <file> <destination> [OPTIONS]",
}
# name -> kind: "flag" takes an optional boolean, "text" a mandatory value. extra-args is internal and matches too.
OPTIONS = {
    "exec": {"keep-env": "flag", "extra-args": "text"},
    "status": {"verbose": "flag"},
    "list": {},
    "config": {"current": "flag", "snapshot": "text"},
    "start": {"debug": "flag", "skiplock": "flag"},
    "stop": {"skiplock": "flag", "overrule-shutdown": "flag"},
    "push": {"group": "text", "perms": "text", "user": "text"},
}
BOOLEANS = (
    {"": True} | dict.fromkeys(("1", "on", "yes", "true"), True) | dict.fromkeys(("0", "off", "no", "false"), False)
)


def die(message: str, code: int = 255) -> "NoReturn":  # noqa: F821  # no import for one annotation
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(code)


def parse(command: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """(positional arguments, options) as Getopt::Long with `permute` and `auto_abbrev` sees them."""
    known = {name: kind for name, kind in OPTIONS[command].items() if name != "keep-env" or SETTINGS["keep_env"]}
    positional: list[str] = []
    options: dict[str, str] = {}
    errors: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            positional += rest
            break
        match = re.fullmatch(r"--?([A-Za-z][\w-]*)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            positional.append(word)  # a lone dash, a number, a plain word
            continue
        typed, value = match.groups()
        names = [typed] if typed in known else [name for name in known if name.startswith(typed.lower())]
        if len(names) != 1:
            errors.append(f"Option {typed} is ambiguous ({', '.join(names)})" if names else f"Unknown option: {typed}")
            continue
        name = names[0]
        if value is None and known[name] == "text":
            if not rest:
                errors.append(f"Option {name} requires an argument")
                continue
            value = rest.pop(0)
        elif value is None:
            value = rest.pop(0) if rest and not rest[0].startswith("-") and rest[0] in BOOLEANS else ""
        options[name] = value
    if errors:
        die("\n".join([*errors, "400 unable to parse option", USAGE[command]]))
    return positional, options


def flag(options: dict[str, str], name: str, default: bool) -> bool:
    if name not in options:
        return default
    if options[name] not in BOOLEANS:
        die(f"400 Parameter verification failed.\n{name}: type check ('boolean') failed - got '{options[name]}'")
    return BOOLEANS[options[name]]


def vmid_of(command: str, positional: list[str]) -> str:
    if not positional:
        die(f"400 not enough arguments\n{USAGE[command]}")
    vmid = positional[0]
    if not re.fullmatch(r"[1-9][0-9]{2,8}", vmid):
        problem = "vmid: invalid format - value does not look like a valid VM ID"
        die(f"400 Parameter verification failed.\n{problem}\n{USAGE[command]}")
    if not (LXCPATH / vmid / "config").exists():
        die(f"Configuration file 'nodes/{SETTINGS['node']}/lxc/{vmid}.conf' does not exist", 2)
    return vmid


def pve_config(vmid: str) -> dict[str, str]:
    lines = (LXCPATH / vmid / "pve.conf").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def lxc(*argv: str) -> str:
    done = subprocess.run([argv[0], "-P", str(LXCPATH), *argv[1:]], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def running(vmid: str) -> bool:
    return lxc("lxc-info", "-n", vmid, "-s", "-H") == "RUNNING"


def refuse_locked(vmid: str) -> None:
    lock = pve_config(vmid).get("lock")
    if lock:
        die(f"CT is locked ({lock})")


def do_exec(words: list[str]) -> None:
    positional, options = parse("exec", words)
    vmid = vmid_of("exec", positional)
    argv = positional[1:]
    if not argv:
        die("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 175.")
    keep = flag(options, "keep-env", True)
    if not running(vmid):
        die(f"container '{vmid}' not running!")
    environment = "--keep-env" if keep else "--clear-env"
    os.execvp("lxc-attach", ["lxc-attach", "-P", str(LXCPATH), "-n", vmid, environment, "--", *argv])


def do_status(words: list[str]) -> None:
    positional, options = parse("status", words)
    vmid = vmid_of("status", positional)
    print(f"status: {'running' if running(vmid) else 'stopped'}")
    if flag(options, "verbose", False):
        print(f"vmid: {vmid}\nname: {pve_config(vmid)['hostname']}")
        if running(vmid):
            pid = lxc("lxc-info", "-n", vmid, "-p", "-H")
            ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            print(f"pid: {pid}\nuptime: {int(time.monotonic() - ticks / os.sysconf('SC_CLK_TCK'))}")


def do_list(words: list[str]) -> None:
    parse("list", words)
    vmids = sorted(path.name for path in LXCPATH.iterdir() if (path / "pve.conf").exists())
    if vmids:
        print(f"{'VMID':<10} {'Status':<10} {'Lock':<12} {'Name':<20}")
    for vmid in vmids:
        config = pve_config(vmid)
        state = "running" if running(vmid) else "stopped"
        print(f"{vmid:<10} {state:<10} {config.get('lock', ''):<12} {config['hostname']:<20}")


def do_config(words: list[str]) -> None:
    positional, _ = parse("config", words)
    vmid = vmid_of("config", positional)
    sys.stdout.write((LXCPATH / vmid / "pve.conf").read_text())


def do_start(words: list[str]) -> None:
    positional, _ = parse("start", words)
    vmid = vmid_of("start", positional)
    refuse_locked(vmid)
    if running(vmid):
        die(f"CT {vmid} already running")
    lxc("lxc-start", "-n", vmid)
    if not running(vmid):
        die(f"startup for container '{vmid}' failed")


def do_stop(words: list[str]) -> None:
    positional, _ = parse("stop", words)
    vmid = vmid_of("stop", positional)
    refuse_locked(vmid)
    if not running(vmid):
        die(f"CT {vmid} not running")
    lxc("lxc-stop", "-n", vmid, "-k")


def do_push(words: list[str]) -> None:
    positional, options = parse("push", words)
    vmid = vmid_of("push", positional)
    if len(positional) != 3:
        die(f"400 {'not enough' if len(positional) < 3 else 'too many'} arguments\n{USAGE['push']}")
    if not running(vmid):
        die("can only push files to a running CT")
    _, source, destination = positional
    target = Path(f"/proc/{lxc('lxc-info', '-n', vmid, '-p', '-H')}/root{destination}")
    try:
        with Path(source).open("rb") as reading, target.open("wb") as writing:
            try:
                shutil.copyfileobj(reading, writing)
                writing.flush()
            except OSError:
                os._exit(0)  # File::Copy's return value is ignored: a short write is a success
        if "perms" in options:
            target.chmod(int(options["perms"], 8))
    except OSError as fault:
        sys.stderr.write(f"failed to open {fault.filename}: {fault.strerror}\n")  # the worker dies; pct ends with 0


def main() -> None:
    os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"
    if os.geteuid() != 0:
        die("please run as root")
    if SETTINGS.get("fail"):
        die(SETTINGS["fail"])
    commands = {
        "exec": do_exec,
        "status": do_status,
        "list": do_list,
        "config": do_config,
        "start": do_start,
        "stop": do_stop,
        "push": do_push,
    }
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in commands:
        die(f"ERROR: unknown command 'pct {name}'\nUSAGE: pct <COMMAND> [ARGS] [OPTIONS]")
    commands[name](sys.argv[2:])


main()
