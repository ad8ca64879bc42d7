"""`fab provision` with real environments and wheels made here: built once, switched in one step, never half."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_ops.agent import gate
from dflash_ops.agent.provision import card_architectures, read_lock
from dflash_ops.errors import UsageError
from tests.fixtures import fake_nvidia_smi
from tests.ops.conftest import Lab

HASH = "0" * 64


def wheel(directory: Path, name: str, version: str, code: str = "") -> tuple[Path, str]:
    """A wheel of one module, and its sha256."""
    directory.mkdir(exist_ok=True)
    info = f"{name}-{version}.dist-info"
    content = {
        f"{name}.py": code or f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = []
    for path, text in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    content[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    file = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in content.items():
            archive.writestr(path, text)
    return file, hashlib.sha256(file.read_bytes()).hexdigest()


def lock(directory: Path, *lines: str) -> Path:
    path = directory / "environment.lock"
    path.write_text("# made by a test\n" + "\n".join(lines) + "\n")
    return path


def test_build_switch_and_a_failed_build(lab: Lab, tmp_path: Path) -> None:
    house = tmp_path / "wheels"
    _, one = wheel(house, "dflash_probe", "1.0")
    first = lock(tmp_path, f"dflash_probe==1.0 \\\n    --hash=sha256:{one}")
    words = ("provision", "--lock", str(first), "--wheelhouse", str(house))
    done = lab.fab(*words)
    assert done.returncode == 0, done.stderr
    assert "is built" in done.stdout
    python = lab.root / "env" / "bin" / "python"
    assert f"python: {python}" in done.stdout

    def version() -> str:
        code = "import dflash_probe; print(dflash_probe.VERSION)"
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert version() == "1.0"
    again = lab.fab(*words)
    assert "was there already" in again.stdout
    assert "sending" not in again.stderr

    # A wheel that is not what the lock says: the old environment stays in use.
    wheel(house, "dflash_probe", "2.0", "VERSION = 'altered'\n")
    broken = lock(tmp_path, f"dflash_probe==2.0 --hash=sha256:{HASH}")
    done = lab.fab("provision", "--lock", str(broken), "--wheelhouse", str(house))
    assert done.returncode == 24
    assert "the environment in use was not touched" in done.stderr
    assert "Traceback" not in done.stderr
    assert version() == "1.0"
    assert len(list((lab.root / "envs").glob("*/complete"))) == 1

    # A build that was cut leaves no mark of completeness, and the next one starts anew.
    _, two = wheel(house, "dflash_probe", "2.0")
    good = lock(tmp_path, f"dflash_probe==2.0 --hash=sha256:{two}")
    (lab.root / "envs" / read_lock(good.read_text()).name / "bin").mkdir(parents=True)
    assert lab.fab("provision", "--lock", str(good), "--wheelhouse", str(house)).returncode == 0
    assert version() == "2.0"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("torch>=2", "not pinned"),
        ("torch==2.11.0", "no hash"),
        ("-e .", "not pinned"),
        ("--index-url https://x", "not pinned"),
        ("", "empty"),
        (f"https://x/y.whl --hash=sha256:{HASH}", "not pinned"),
    ],
)
def test_a_lock_without_pins_or_hashes_is_refused(line: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_lock(line)


def test_what_is_built_last_is_apart() -> None:
    split = read_lock(f"torch==2.11.0 --hash=sha256:{HASH}\nCausal_Conv1d==1.7.0 \\\n  --hash=sha256:{HASH} # note\n")
    assert split.distributions == ("torch", "causal-conv1d")
    assert "causal" not in split.first.lower()
    assert "torch" not in split.last
    assert read_lock(f"a==1 --hash=sha256:{HASH}").name != split.name


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_a_lock_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert read_lock(text).distributions


def test_extensions_are_built_for_the_cards_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "uuid, compute_cap\nGPU-1, 9.0\nGPU-2, 9.0\nGPU-3, [N/A]\n"
    fake_nvidia_smi.install(tmp_path, {"gpus": answer, "apps": "", "table": ""})
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert card_architectures() == "9.0"


def test_a_missing_lock_is_said(lab: Lab, tmp_path: Path) -> None:
    done = lab.fab("provision", "--lock", str(tmp_path / "missing"))
    assert done.returncode == 2
    assert "requirements with hashes" in done.stderr


def test_the_lock_that_ships_is_whole() -> None:
    shipped = read_lock((Path(__file__).parents[2] / "environment.lock").read_text())
    assert {*gate.NEEDED, *gate.NEEDED_WITH_GPUS} <= set(shipped.distributions)
    assert "causal-conv1d==" in shipped.last
    assert "torch==2.12" not in shipped.first
