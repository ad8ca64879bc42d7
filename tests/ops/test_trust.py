"""known_hosts: which lines mean a host, what is refused, and that a file keeps all that is not ours to change.

Shown able to fail: with `check` passing any fingerprint, with hashed names ignored, and with `store` rewriting only its
own line, the tests of these went red.
"""

from __future__ import annotations

from pathlib import Path

import paramiko
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops import trust
from dflash_ops.errors import HostKeyChanged, HostKeyRefused
from dflash_ops.settings import Ssh
from dflash_ops.trust import HostKey, Known

KEY = HostKey("[pve]:2222", "ssh-ed25519", "AAAAnew", "SHA256:abc")


def on_file(path: Path, name: str = KEY.name) -> Known:
    return trust.known(Ssh(host="pve", known_hosts=str(path)), name)


class TestCheck:
    def test_a_fingerprint_that_matches_in_any_usual_form(self) -> None:
        nothing = Known(Path("x"), ())
        for form in ("SHA256:abc", "abc", " SHA256:abc=\n", ""):
            assert trust.check(KEY, nothing, form, replace=False) is False

    @pytest.mark.parametrize("other", ["SHA256:abd", "abcd", "SHA256:ABC", "MD5:00:11"])
    def test_one_that_does_not(self, other: str) -> None:
        for replace in (False, True):
            with pytest.raises(HostKeyRefused, match="does not match"):
                trust.check(KEY, Known(Path("x"), ()), other, replace=replace)

    def test_known_already(self) -> None:
        assert trust.check(KEY, Known(Path("x"), (("ssh-ed25519", "AAAAnew"),)), "", replace=False) is True

    def test_changed(self) -> None:
        old = Known(Path("x"), (("ssh-ed25519", "AAAAold"),))
        with pytest.raises(HostKeyChanged, match="CHANGED"):
            trust.check(KEY, old, "SHA256:abc", replace=False)
        assert trust.check(KEY, old, "SHA256:abc", replace=True) is False


class TestFile:
    def test_a_new_file_is_private(self, tmp_path: Path) -> None:
        path = tmp_path / "ssh" / "known_hosts"
        trust.store(KEY, path)
        assert path.read_text() == "[pve]:2222 ssh-ed25519 AAAAnew\n"
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert on_file(path).keys == (("ssh-ed25519", "AAAAnew"),)

    def test_everything_else_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "known_hosts"
        before = "# mine\n\nother ssh-rsa AAAA a comment\n[pve]:2222,pve2 ssh-ed25519 AAAAold\n@revoked * ssh-rsa AA\nx"
        path.write_text(before)
        trust.store(KEY, path)
        assert path.read_text().splitlines() == [
            "# mine",
            "",
            "other ssh-rsa AAAA a comment",
            "pve2 ssh-ed25519 AAAAold",
            "@revoked * ssh-rsa AA",
            "x",
            "[pve]:2222 ssh-ed25519 AAAAnew",
        ]

    def test_hashed_names(self, tmp_path: Path) -> None:
        path = tmp_path / "known_hosts"
        path.write_text(f"{paramiko.HostKeys.hash_host('[pve]:2222')} ssh-ed25519 AAAAold\n|1|bad|hash ssh-rsa A\n")
        assert on_file(path).keys == (("ssh-ed25519", "AAAAold"),)
        assert on_file(path, "elsewhere").keys == ()
        trust.store(KEY, path)
        assert on_file(path).keys == (("ssh-ed25519", "AAAAnew"),)

    def test_no_file(self, tmp_path: Path) -> None:
        assert on_file(tmp_path / "absent").keys == ()

    def test_a_link_stays_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").write_text("")
        (tmp_path / "link").symlink_to(tmp_path / "real")
        trust.store(KEY, on_file(tmp_path / "link").path)
        assert (tmp_path / "link").is_symlink()
        assert "AAAAnew" in (tmp_path / "real").read_text()

    @given(st.binary())
    def test_any_content_survives(self, content: bytes) -> None:
        import tempfile

        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "known_hosts"
            path.write_bytes(content)
            trust.store(KEY, path)
            assert path.read_bytes().endswith(KEY.line.encode() + b"\n")
            assert on_file(path).keys == (("ssh-ed25519", "AAAAnew"),)
