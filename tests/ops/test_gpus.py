"""What the probe reads from nvidia-smi and /proc.

Shown able to fail: with `parse_table` taking an empty table for TABLE_EMPTY, with `ask` waiting for ever, and with the
guest's pattern looking for /lxc/ only, the tests named for these went red.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.agent import gpus, nvidia_smi
from dflash_ops.agent.gpu_facts import (
    FAILED,
    NO_NVIDIA_SMI,
    OK,
    TABLE_EMPTY,
    TABLE_HIDDEN,
    TABLE_NAMED,
    TABLE_UNREAD,
    TIMED_OUT,
    GpuFacts,
)
from tests.fixtures.fake_nvidia_smi import BUSY, IDLE, RECORDINGS, TWO_IDLE, install
from tests.waiting import PATIENCE_S

UUID = "GPU-00000000-0000-4000-8000-000000000000"


def probe(
    tmp_path: Path, scenario: dict[str, object], where: str = "container", limit_s: float = PATIENCE_S
) -> GpuFacts:
    program = install(tmp_path / "smi", scenario)
    return gpus.probe(where, samples=3, interval_s=0.0, limit_s=limit_s, program=str(program), proc=tmp_path / "proc")


class TestRecorded:
    """Output of real cards."""

    def test_idle(self, tmp_path: Path) -> None:
        facts = probe(tmp_path, IDLE)
        assert (facts.state, facts.table, facts.processes) == (OK, TABLE_EMPTY, ())
        (card,) = facts.cards
        assert (card.uuid, card.index, card.name, card.memory_total_mib) == (UUID, 0, "NVIDIA H200", 143771)
        assert [sample.memory_mib for sample in card.samples] == [0, 0, 0]
        assert (card.mig, card.ecc_uncorrected, card.unreadable) == (False, 0, ())
        assert facts.driver_version == "580.159.04"

    def test_busy_names_the_process_once(self, tmp_path: Path) -> None:
        facts = probe(tmp_path, BUSY)
        assert facts.table == TABLE_NAMED
        (process,) = facts.processes  # listed by the query twice and by the table once
        assert (process.gpu_uuid, process.pid, process.name, process.memory_mib) == (UUID, 430, "python3", 4614)

    def test_two_cards_are_two_lines(self, tmp_path: Path) -> None:
        assert [card.index for card in probe(tmp_path, TWO_IDLE).cards] == [0, 1]


class TestFaults:
    """What a healthy machine does not show."""

    @pytest.mark.parametrize("text", ["[N/A]", "[Not Supported]", "[Unknown Error]", "[Insufficient Permissions]"])
    def test_a_field_that_is_no_number_is_kept_as_unreadable(self, tmp_path: Path, text: str) -> None:
        recorded = (RECORDINGS / "h200_gpus_idle.csv").read_text().replace(" 0 %,", f" {text},")
        (card,) = probe(tmp_path, {**IDLE, "gpus": recorded}).cards
        assert card.samples[0].utilization is None
        assert card.unreadable == (f"utilization.gpu: {text}",)

    def test_an_empty_table_without_the_sentence_hides_processes(self, tmp_path: Path) -> None:
        hidden = (RECORDINGS / "h200_idle.txt").read_text().replace("No running processes found", " " * 26)
        assert probe(tmp_path, {**IDLE, "table": hidden}).table == TABLE_HIDDEN

    def test_no_table_at_all(self, tmp_path: Path) -> None:
        assert probe(tmp_path, {**IDLE, "table": ""}).table == TABLE_UNREAD

    @pytest.mark.parametrize(
        ("code", "text", "problem"),
        [
            (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", "communicate"),
            (
                18,
                "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54\n",
                "550.54",
            ),
            (15, "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n", "a card is lost"),
            (0, "Unable to determine the device handle for GPU 0: GPU is lost.\n", "a card is lost"),
            (6, "No devices were found\n", "No devices"),
            (0, "No devices were found\n", "no header"),
            (0, "", "no output"),
            (3, "", "no message"),
        ],
    )
    def test_an_error_keeps_its_words(self, tmp_path: Path, code: int, text: str, problem: str) -> None:
        facts = probe(tmp_path, {**IDLE, "gpus": {"code": code, "text": text}})
        assert facts.state == FAILED
        assert problem in facts.problem

    def test_a_card_lost_between_two_samples_has_fewer_of_them(self, tmp_path: Path) -> None:
        facts = probe(tmp_path, {**TWO_IDLE, "gpus": ["@h200_x2_gpus_idle.csv", "@h200_gpus_idle.csv"]})
        assert [len(card.samples) for card in facts.cards] == [3, 1]

    @pytest.mark.parametrize("kind", ["gpus", "apps", "table"])
    def test_a_hang_ends_at_the_limit(self, tmp_path: Path, kind: str) -> None:
        facts = probe(tmp_path, {**IDLE, kind: "hang"}, limit_s=1.0)
        assert facts.state == TIMED_OUT
        assert "1 s" in facts.problem

    def test_an_old_driver_is_asked_for_fewer_fields(self, tmp_path: Path) -> None:
        refusal = {"code": 2, "text": 'Field "mig.mode.current" is not a valid field to query.\n'}
        facts = probe(tmp_path, {**IDLE, "gpus": [refusal, "@h200_gpus_busy.csv"]})
        assert (facts.state, facts.cards[0].mig) == (OK, None)

    def test_no_program(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "SEARCH_PATH", str(tmp_path))
        monkeypatch.setenv("PATH", str(tmp_path))
        assert gpus.probe("container", proc=tmp_path).state == NO_NVIDIA_SMI

    def test_a_process_name_with_commas(self) -> None:
        text = f"gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n{UUID}, 7, python -c a, b, c, 12 MiB\n"
        (process,) = nvidia_smi.parse_apps(text)
        assert (process.name, process.memory_mib) == ("python -c a, b, c", 12)

    def test_a_process_row_that_makes_no_sense_is_still_a_process(self) -> None:
        (process,) = nvidia_smi.parse_apps("gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n[Unknown Error]\n")
        assert (process.gpu_uuid, process.pid) == (None, None)

    @pytest.mark.parametrize(
        "line",
        [
            "|    0   N/A  N/A       430      C   python3                             4614MiB |",
            "|    0       430      C   python3                                         4614MiB |",
            "|    0   N/A  N/A       430    C+G   python3                                 N/A  |",
            "|    0     1    0       430      C   python3                             4614MiB |",
        ],
    )
    def test_table_rows_of_several_drivers(self, line: str) -> None:
        table, (row,) = nvidia_smi.parse_table(f"| Processes: |\n{line}\n", {0: UUID})
        assert (table, row.gpu_uuid, row.pid, row.name) == (TABLE_NAMED, UUID, 430, "python3")


class TestGuests:
    """Whose process it is: read from a copy of /proc."""

    def make(self, proc: Path, pid: int, cgroup: str, nspid: str, *, comm: str = "python3", holds: str = "") -> None:
        folder = proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        (folder / "cgroup").write_text(cgroup)
        (folder / "status").write_text(f"Name:\t{comm}\nNSpid:\t{nspid}\nThreads:\t1\n")
        (folder / "comm").write_text(comm + "\n")
        if holds:
            (folder / "fd" / "5").symlink_to(holds)

    @pytest.mark.parametrize(
        ("cgroup", "nspid", "expected"),
        [
            ("0::/lxc/200/ns/system.slice/x.service\n", "430\t77", ("lxc/200", 77)),
            ("0::/lxc/200/.lxc\n", "430\t9\t3", ("lxc/200", 3)),
            ("9:name=systemd:/lxc/200/ns\n0::/\n", "430\t77", ("lxc/200", 77)),
            ("0::/lxc.payload.200/x\n", "430\t77", ("lxc/200", 77)),
            ("0::/qemu.slice/101.scope\n", "430", ("qemu/101", None)),
            ("0::/user.slice/user-0.slice\n", "430", (None, None)),
        ],
    )
    def test_guest(self, tmp_path: Path, cgroup: str, nspid: str, expected: tuple[str | None, int | None]) -> None:
        self.make(tmp_path, 430, cgroup, nspid)
        assert gpus.guest_of(430, tmp_path) == expected
        assert gpus.guest_of(431, tmp_path) == (None, None)

    def test_the_host_maps_and_the_container_does_not(self, tmp_path: Path) -> None:
        self.make(tmp_path / "proc", 430, "0::/lxc/200/ns\n", "430\t77")
        (process,) = probe(tmp_path, BUSY, where="host").processes
        assert (process.guest, process.inner_pid) == ("lxc/200", 77)
        (process,) = probe(tmp_path, BUSY, where="container").processes
        assert process.guest is None

    def test_holders_of_device_files_that_nvml_omits(self, tmp_path: Path) -> None:
        proc = tmp_path / "proc"
        self.make(proc, 500, "0::/lxc/201/ns\n", "500\t12", comm="pt_data_worker", holds="/dev/nvidia3")
        self.make(proc, 501, "0::/\n", "501", comm="bash", holds="/dev/nvidiactl")
        information = proc / "driver/nvidia/gpus/0000:00:06.0/information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA H200\nGPU UUID: \t {UUID}\nDevice Minor: \t 3\n")
        (process,) = probe(tmp_path, IDLE, where="host").processes
        assert (process.gpu_uuid, process.pid, process.source) == (UUID, 500, "device file")
        assert (process.guest, process.inner_pid) == ("lxc/201", 12)

    def test_kernel_faults(self, tmp_path: Path) -> None:
        log = tmp_path / "kmsg"
        log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n SUBSYSTEM=pci\n")
        assert "79" in gpus.kernel_faults(log)[0]
        assert gpus.kernel_faults(tmp_path / "absent") == ()


class TestGarbage:
    """Whatever comes, the parsers answer or raise Fault, and facts survive their journey."""

    @given(st.text())
    def test_parsers(self, text: str) -> None:
        nvidia_smi.parse_number(text)
        nvidia_smi.parse_table("Processes:" + text, {})
        for parse in (nvidia_smi.parse_cards, nvidia_smi.parse_apps):
            for prefix in ("", "uuid, name\n", "gpu_uuid, process_name\n", "index, uuid, name\n0, GPU-"):
                with contextlib.suppress(nvidia_smi.Fault):
                    parse(prefix + text)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
        )
    )
    def test_from_json_of_anything(self, data: object) -> None:
        assert GpuFacts.from_json(data).state == FAILED

    def test_json_round_trip(self, tmp_path: Path) -> None:
        facts = probe(tmp_path, BUSY)
        assert GpuFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts
