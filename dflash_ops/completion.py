"""Shell completion: verbs and flags are written into the script, the rest is asked for when a word needs it.

What is asked must be quick and must not connect anywhere: targets come from hosts.yaml, variants from the trainer's
own list, run ids from what `fab runs` and `fab status` have last seen (`remember`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ASK_S = 5.0
KEPT = 200
RUN_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[a-z0-9_]{1,40}-[0-9a-f]{4}\Z")
VALUES = {"-H": "targets", "--hosts": "targets", "--variant": "variants", "--run": "runs", "--resume": "runs"}
"""Flags whose value is asked for, and the question."""

BASH = """\
# fab's verbs, targets, variants and run ids. For bash: source it. For zsh: autoload -U +X bashcompinit && bashcompinit
_dflash_fab() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" verb="" at list=""
    for ((at = 1; at < COMP_CWORD; at++)); do
        case " {verbs} " in *" ${{COMP_WORDS[at]}} "*) verb="${{COMP_WORDS[at]}}" ;; esac
    done
    case "$before" in
{values}
        *)
            if [[ "$word" == -* ]]; then
                case "$verb" in
{flags}
                    *) list="-H --list --help" ;;
                esac
            else
                list="{verbs}"
                if [[ "$verb" == report ]]; then
                    list="newest $({python} -m dflash_ops.completion runs 2>/dev/null) $list"
                fi
            fi
            ;;
    esac
    COMPREPLY=($(compgen -W "$list" -- "$word"))
}}
complete -F _dflash_fab fab
"""


def script(verbs: Mapping[str, Sequence[str]], python: str = sys.executable) -> str:
    """The script for bash and zsh; `verbs` maps each verb to its flags."""
    values = "\n".join(
        f'        {flag}) list="$({python} -m dflash_ops.completion {question} 2>/dev/null)" ;;'
        for flag, question in VALUES.items()
    )
    flags = "\n".join(
        f'                    {verb}) list="{" ".join(known)}" ;;' for verb, known in verbs.items() if known
    )
    return BASH.format(verbs=" ".join(verbs), values=values, flags=flags, python=python)


def cache_file() -> Path:
    """Where run ids are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dflash-ops" / "runs.json"


def remember(target: str, run_ids: Iterable[str]) -> None:
    """Keep a target's newest run ids; a cache that cannot be written is no error."""
    try:
        known = _cached()
        known[target] = list(dict.fromkeys([*run_ids, *known.get(target, [])]))[:KEPT]
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(known))
        partial.replace(path)
    except OSError:
        pass


def answer(question: str) -> list[str]:
    """The words for one question; empty where it cannot be answered."""
    match question:
        case "targets":
            from dflash_ops import hosts
            from dflash_ops.errors import OpsError

            try:
                return sorted(hosts.load().targets)
            except OpsError:
                return []
        case "variants":
            return _variants()
        case "runs":
            return ["auto", *(run for runs in _cached().values() for run in runs)]
    return []


def _variants() -> list[str]:
    from dflash_ops import hosts

    try:
        done = subprocess.run(
            [sys.executable, "-m", "trainer", "variants"],
            cwd=hosts.checkout(),
            capture_output=True,
            text=True,
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = [line.split()[0] for line in done.stdout.splitlines() if line.split()]
    return [word for word in words if re.fullmatch(r"[a-z0-9_]{1,40}", word)]


def _cached() -> dict[str, list[str]]:
    """What was remembered; only what looks like run ids, since a shell will see it."""
    try:
        body = json.loads(cache_file().read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(body, dict):
        return {}
    return {
        str(target): [run for run in runs if isinstance(run, str) and RUN_ID.match(run)]
        for target, runs in body.items()
        if isinstance(runs, list)
    }


if __name__ == "__main__":
    print("\n".join(answer(sys.argv[1] if len(sys.argv) > 1 else "")))
