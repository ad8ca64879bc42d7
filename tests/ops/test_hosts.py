"""hosts.yaml: what is accepted, and that everything else is refused with file, line and fix."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import hosts
from dflash_ops.errors import HostsFileError, UsageError
from dflash_ops.launch import target_overrides

WHOLE = """\
default: local
targets:
  local:
    via: local
  ct200:
    via: pct
    ssh: {host: pve.example, user: root, port: 22, connect_timeout: 10, known_hosts: ~/.ssh/known_hosts}
    vmid: 200
    python: /root/venv/bin/python
    root: /root/dflash
    workspace: /workspace
    launcher: tmux
    session: dflash
    gpus: {count: 8, roles: {target: [0, 1], drafter: [2, 3, 4], verifier: [5, 6, 7]}}
    idle: {memory_mib: 64, utilization: 5, samples: 3}
    env: {HF_HOME: /workspace/hf, OMP_NUM_THREADS: 4}
    train: {optim.lr: 0.0003, drafter.sliding_layers: [0, 1]}
"""

HOSTILE = [
    ("vmid: 200", 'vmid: "200; reboot"', 8, "whole number"),
    ("vmid: 200", "vmid: 200; reboot", 8, "whole number"),
    ("vmid: 200", "vmid: $(reboot)", 8, "whole number"),
    ("vmid: 200", 'vmid: "200"', 8, "whole number"),
    ("vmid: 200", "vmid: 0200", 8, "plain decimal"),
    ("vmid: 200", "vmid: 0x200", 8, "plain decimal"),
    ("vmid: 200", "vmid: 3:20", 8, "plain decimal"),
    ("vmid: 200", "vmid: 2_00", 8, "plain decimal"),
    ("vmid: 200", "vmid: 0", 8, "vmid"),
    ("vmid: 200", "vmid: -200", 8, "dash"),
    ("vmid: 200", "vmid: 20.5", 8, "whole number"),
    ("vmid: 200", "vmid: true", 8, "whole number"),
    ("vmid: 200", "vmid: 9999999999", 8, "plain decimal"),
    ("vmid: 200", "vmidd: 200", 8, "did you mean 'vmid'"),
    ("host: pve.example", "host: -oProxyCommand=reboot", 7, "dash"),
    ("host: pve.example", 'host: "pve example"', 7, "host name"),
    ("host: pve.example", 'host: "a\\nb"', 7, "newline"),
    ("user: root", 'user: "root;reboot"', 7, "no name"),
    ("port: 22", "port: 0", 7, "port"),
    ("port: 22", "port: ssh", 7, "whole number"),
    ("port: 22", "prot: 22", 7, "did you mean 'port'"),
    ("root: /root/dflash", "root: dflash", 10, "relative"),
    ("root: /root/dflash", "root: /root/../etc", 10, "'..'"),
    ("root: /root/dflash", 'root: "/root/a\\0b"', 10, "NUL"),
    ("root: /root/dflash", "root: [a]", 10, "text"),
    ("workspace: /workspace", "workspace: -e", 11, "dash"),
    ("python: /root/venv/bin/python", "python: ~/venv/bin/python", 5, "must begin with /"),
    ("launcher: tmux", "launcher: screen", 12, "launcher"),
    ("session: dflash", 'session: "a:b"', 13, "no name"),
    ("count: 8", "count: 4", 14, "the last is 3"),
    ("target: [0, 1]", "target: []", 14, "at least one GPU"),
    ("HF_HOME: /workspace/hf", "HF-HOME: /workspace/hf", 16, "HF-HOME"),
    ("HF_HOME: /workspace/hf", "HF_HOME: yes", 16, "quotes"),
    ("train: {", 'train: {"a b": 1, ', 17, "a b"),
    ("default: local", "default: lokal", 1, "not among targets"),
    ("  local:\n    via: local", "  local:\n    via: lokal", 4, "via"),
    ("  local:\n    via: local", "  local:\n    via: local\n    via: pct", 5, "given twice"),
    ("  local:\n    via: local", "  local:\n    via: local\n    vmid: 3", 3, "neither"),
    ("  ct200:", '  "-ct":', 5, "dash"),
    ("  ct200:", '  "c t":', 5, "no name"),
    ("targets:", "target:", 1, "targets"),
]


@pytest.mark.parametrize(("good", "bad", "line", "says"), HOSTILE, ids=[case[1].strip()[:40] for case in HOSTILE])
def test_refused_at_its_line(good: str, bad: str, line: int, says: str) -> None:
    """Shown able to fail: with pydantic's lax mode the quoted vmid passes, without the walk 0200 becomes 128."""
    assert good in WHOLE
    with pytest.raises(HostsFileError) as caught:
        hosts.parse(WHOLE.replace(good, bad, 1), "hosts.yaml")
    assert caught.value.exit_code == 2
    assert caught.value.what.startswith(f"hosts.yaml:{line}:")
    assert says in "\n".join(caught.value.lines())
    assert caught.value.hint


def refusal(text: str) -> str:
    """The refusal's first line; empty where the text is accepted."""
    try:
        hosts.parse(text, "hosts.yaml")
    except HostsFileError as error:
        return error.what
    return ""


@given(st.text(max_size=200))
def test_any_text_is_refused_never_a_traceback(text: str) -> None:
    assert refusal(text).startswith("hosts.yaml")


DAMAGE = ["\0", "\n", "\t", "- ", "&a ", "*a", "{", "]", "'", '"', ": ", "!!python/object:os.x ", "<<: ", "? "]


@given(st.integers(0, len(WHOLE) - 1), st.sampled_from(DAMAGE))
def test_damage_anywhere_is_accepted_or_refused_never_a_traceback(at: int, damage: str) -> None:
    said = refusal(WHOLE[:at] + damage + WHOLE[at + 1 :])
    assert said == "" or said.startswith("hosts.yaml")


def test_the_documented_file_is_accepted() -> None:
    target = hosts.parse(WHOLE, "x").targets["ct200"]
    assert (target.vmid, target.python, target.root, target.workspace) == (
        200, "/root/venv/bin/python", "/root/dflash", "/workspace",
    )  # fmt: skip
    assert target.env == {"HF_HOME": "/workspace/hf", "OMP_NUM_THREADS": "4"}
    assert target_overrides(target) == {
        "topology.target": '["cuda:0", "cuda:1"]',
        "topology.drafter": '["cuda:2", "cuda:3", "cuda:4"]',
        "topology.verifier": '["cuda:5", "cuda:6", "cuda:7"]',
        "optim.lr": "0.0003",
        "drafter.sliding_layers": "[0, 1]",
    }


def test_the_shipped_file_is_valid_and_local_expands_its_home() -> None:
    target = hosts.load(hosts.checkout() / "hosts.yaml").targets["local"]
    assert target.root.startswith("/")
    assert target.workspace == target.root


def test_a_missing_file_says_so(tmp_path: object) -> None:
    with pytest.raises(HostsFileError, match="cannot be read"):
        hosts.load(hosts.Path(f"{tmp_path}/none.yaml"))


class TestSelecting:
    def names(self, *words: str) -> list[str]:
        return [target.name for target in hosts.select(hosts.parse(WHOLE, "x"), list(words))]

    def test_without_h_the_default(self) -> None:
        assert self.names() == ["local"]

    def test_several_in_order_and_once(self) -> None:
        assert self.names("ct200", "local", "ct200") == ["ct200", "local"]

    def test_a_misspelt_name_is_not_taken_for_a_host(self) -> None:
        with pytest.raises(UsageError) as caught:
            self.names("ct20")
        assert "did you mean 'ct200'" in caught.value.hint

    @pytest.mark.parametrize(
        ("word", "user", "host", "port"),
        [
            ("root@box:2222", "root", "box", 2222),
            ("box.example.org", None, "box.example.org", None),
            ("[::1]:22", None, "::1", 22),
            ("10.0.0.7", None, "10.0.0.7", None),
        ],
    )
    def test_raw_host_strings_are_plain_ssh(self, word: str, user: str | None, host: str, port: int | None) -> None:
        (target,) = hosts.select(hosts.parse(WHOLE, "x"), [word])
        assert target.via == "ssh"
        assert target.ssh is not None
        assert (target.ssh.user, target.ssh.host, target.ssh.port) == (user, host, port)

    @pytest.mark.parametrize(
        "word", ["-oProxyCommand=x", "a;b", "a b", "$(x)", "a@b@c", "box:99999999", "box:0", "ü.de", ""]
    )
    def test_anything_else_is_refused(self, word: str) -> None:
        with pytest.raises(UsageError):
            self.names(word)
