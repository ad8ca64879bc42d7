"""The policy: which facts make a card busy, idle or unknown.

Shown able to fail: with `views` cut to the container alone, with `max` over samples replaced by the last sample, and
with unreadable fields ignored, the tests of those rules went red.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_ops.agent.gpu_facts import (
    FAILED,
    NO_NVIDIA_SMI,
    OK,
    TABLE_EMPTY,
    TABLE_HIDDEN,
    TABLE_NAMED,
    TABLE_UNREAD,
    TIMED_OUT,
    Card,
    GpuFacts,
    GpuProcess,
    Sample,
)
from dflash_ops.preflight import Expected, Status, Verdict, judge

IDLE_SAMPLES = (Sample(0, 0), Sample(3, 0), Sample(0, 1))


def card(index: int, samples: tuple[Sample, ...] = IDLE_SAMPLES, **more: object) -> Card:
    return Card(f"GPU-{index}", index, "NVIDIA H200", samples, **more)  # type: ignore[arg-type]


def view(where: str, *cards: Card, **more: object) -> GpuFacts:
    return GpuFacts(where, OK, cards=cards, table=TABLE_EMPTY, driver_version="580.1", **more)  # type: ignore[arg-type]


CONTAINER = view("container", card(0), card(1))
HOST = view("host", card(0), card(1), card(2), pci_cards=3)
TWO = Expected(count=2)


def only_line(verdict: Verdict) -> str:
    (line,) = verdict.lines
    return line


class TestIdle:
    def test_both_views_agree(self) -> None:
        verdict = judge(TWO, CONTAINER, HOST)
        assert verdict.status is Status.IDLE
        assert only_line(verdict).startswith("2 cards idle")
        assert "container and host" in only_line(verdict)

    def test_a_bare_machine_has_one_view(self) -> None:
        assert judge(TWO, replace(CONTAINER, where="machine")).status is Status.IDLE

    def test_use_of_a_card_that_is_not_ours_does_not_matter(self) -> None:
        host = replace(HOST, table=TABLE_NAMED, processes=(GpuProcess("GPU-2", 9, "python3", "compute-apps"),))
        assert judge(TWO, CONTAINER, host).status is Status.IDLE

    def test_driver_services_hold_device_files(self) -> None:
        service = GpuProcess("GPU-0", 9, "nvidia-persiste", "device file")
        assert judge(TWO, CONTAINER, replace(HOST, processes=(service,))).status is Status.IDLE


class TestBusy:
    def test_a_process_of_another_guest_is_named(self) -> None:
        process = GpuProcess("GPU-1", 4242, "python3", "compute-apps", 4614.0, "lxc/201", 77)
        verdict = judge(TWO, CONTAINER, replace(HOST, table=TABLE_NAMED, processes=(process,)))
        assert verdict.status is Status.BUSY
        assert only_line(verdict) == "card 1: python3 (pid 4242 of guest lxc/201, pid 77 inside) holds 4614 MiB [host]"
        assert [one.status for one in verdict.cards] == [Status.IDLE, Status.BUSY]

    def test_memory_without_a_process(self) -> None:
        host = view("host", card(0, (Sample(10240, 100),) * 3), card(1))
        verdict = judge(TWO, CONTAINER, host)
        assert verdict.status is Status.BUSY
        assert "card 0: 10240 MiB in use (host; idle is up to 64 MiB)" in verdict.lines
        assert "card 0: utilization 100 % (host; idle is up to 5 %)" in verdict.lines

    def test_one_busy_sample_is_enough(self) -> None:
        container = view("container", card(0, (Sample(0, 90), Sample(0, 0), Sample(0, 0))), card(1))
        assert judge(TWO, container, HOST).status is Status.BUSY

    def test_a_left_over_worker_holds_the_device_file(self) -> None:
        holder = GpuProcess("GPU-0", 9, "pt_data_worker", "device file")
        verdict = judge(TWO, CONTAINER, replace(HOST, processes=(holder,)))
        assert "holds its device file open" in only_line(verdict)

    def test_a_process_on_an_unknown_card_may_be_on_ours(self) -> None:
        verdict = judge(TWO, CONTAINER, replace(HOST, processes=(GpuProcess(None, None, "[unnamed]", "compute-apps"),)))
        assert verdict.status is Status.BUSY
        assert "a card not known by UUID" in only_line(verdict)

    def test_busy_outranks_unknown_and_both_are_told(self) -> None:
        container = view("container", card(0, (Sample(999, 0),) * 3))
        verdict = judge(TWO, container, HOST)
        assert verdict.status is Status.BUSY
        assert verdict.lines[0].startswith("card 0: 999 MiB")
        assert "1 of 2 expected cards are there (container)" in verdict.lines

    def test_a_host_without_nvidia_smi_still_shows_holders(self) -> None:
        holder = GpuProcess("GPU-0", 9, "python3", "device file", guest="lxc/201")
        host = GpuFacts("host", NO_NVIDIA_SMI, processes=(holder,))
        assert judge(TWO, CONTAINER, host).status is Status.BUSY


class TestUnknown:
    @pytest.mark.parametrize(
        ("container", "host", "sentence"),
        [
            (
                replace(CONTAINER, table=TABLE_HIDDEN),
                HOST,
                "container's nvidia-smi has processes that it cannot",
            ),
            (CONTAINER, replace(HOST, table=TABLE_HIDDEN), "host's nvidia-smi has processes that it cannot"),
            (CONTAINER, replace(HOST, table=TABLE_UNREAD), "the host's nvidia-smi printed no process table"),
            (
                CONTAINER,
                GpuFacts("host", TIMED_OUT, "nvidia-smi did not end"),
                "host: nvidia-smi did not end",
            ),
            (GpuFacts("container", FAILED, "a card is lost: GPU is lost."), HOST, "container: a card is lost"),
            (
                GpuFacts("container", FAILED, "Failed to initialize NVML: Driver/library version mismatch"),
                HOST,
                "must equal the host's kernel module (the host runs 580.1)",
            ),
            (GpuFacts("container", NO_NVIDIA_SMI, "nvidia-smi is not installed here"), HOST, "0 of 2 expected cards"),
            (
                GpuFacts("container", NO_NVIDIA_SMI, "nvidia-smi is not installed here", device_files=2),
                HOST,
                "yet /dev has 2 cards",
            ),
            (view("container", card(0)), HOST, "1 of 2 expected cards are there (container)"),
            (CONTAINER, replace(HOST, pci_cards=8), "the PCI bus has 8 cards, nvidia-smi lists 3 (host)"),
            (CONTAINER, view("host", card(0)), "card 1: the host does not list this card"),
            (
                view("container", card(0, (Sample(0, None),) * 3, unreadable=("utilization.gpu: [N/A]",)), card(1)),
                HOST,
                "card 0: nvidia-smi gives no number (container): utilization.gpu: [N/A]",
            ),
            (
                view("container", card(0, (Sample(0, None),) * 3, mig=True), card(1)),
                HOST,
                "card 0: MIG is on",
            ),
            (view("container", card(0, IDLE_SAMPLES[:1]), card(1)), HOST, "card 0: seen in 1 of 3 samples (container)"),
            (
                view("container", card(0), card(1, compute_mode="Prohibited")),
                HOST,
                "card 1: compute mode is",
            ),
        ],
    )
    def test_says_why(self, container: GpuFacts, host: GpuFacts, sentence: str) -> None:
        verdict = judge(TWO, container, host)
        assert verdict.status is Status.UNKNOWN
        assert any(sentence in line for line in verdict.lines), verdict.lines

    def test_a_missing_card_is_named_by_uuid(self) -> None:
        expected = Expected(uuids=("GPU-0", "GPU-2", "GPU-9"))
        lines = judge(expected, CONTAINER, HOST).lines
        assert "card GPU-2 is missing from the container; the host still lists it" in lines
        assert "card GPU-9 is missing from the container; the host does not list it either" in lines


class TestNoGpu:
    NONE = GpuFacts("machine", NO_NVIDIA_SMI, "nvidia-smi is not installed here")

    def test_none_there_and_none_expected(self) -> None:
        assert judge(Expected(), self.NONE).status is Status.NO_GPU

    def test_none_there_but_expected(self) -> None:
        assert judge(TWO, self.NONE).status is Status.UNKNOWN
        assert judge(Expected(uuids=("GPU-0",)), self.NONE).status is Status.UNKNOWN

    def test_a_device_file_without_nvidia_smi_is_no_machine_without_gpus(self) -> None:
        assert judge(Expected(), replace(self.NONE, device_files=1)).status is Status.UNKNOWN

    def test_cpu_on_purpose(self) -> None:
        assert judge(Expected(count=0), CONTAINER, HOST).status is Status.NO_GPU


numbers = st.none() | st.floats(0, 1e6)
cards = st.builds(
    Card,
    uuid=st.sampled_from(["GPU-0", "GPU-1", "GPU-2"]),
    index=st.none() | st.integers(0, 9),
    name=st.just("x"),
    samples=st.lists(st.builds(Sample, numbers, numbers), max_size=4).map(tuple),
    mig=st.none() | st.booleans(),
    compute_mode=st.sampled_from([None, "Default", "Prohibited"]),
    unreadable=st.lists(st.text(), max_size=1).map(tuple),
)
processes = st.builds(
    GpuProcess,
    gpu_uuid=st.sampled_from([None, "GPU-0", "GPU-1"]),
    pid=st.none() | st.integers(0, 9),
    name=st.just("x"),
    source=st.sampled_from(["compute-apps", "table", "device file"]),
)
facts = st.builds(
    GpuFacts,
    where=st.sampled_from(["container", "host", "machine"]),
    state=st.sampled_from([OK, OK, OK, FAILED, TIMED_OUT, NO_NVIDIA_SMI]),
    cards=st.lists(cards, max_size=3).map(tuple),
    processes=st.lists(processes, max_size=1).map(tuple),
    table=st.sampled_from([TABLE_EMPTY, TABLE_EMPTY, TABLE_NAMED, TABLE_HIDDEN, TABLE_UNREAD]),
    pci_cards=st.none() | st.integers(0, 4),
    device_files=st.integers(0, 2),
)


class TestAlways:
    @given(container=facts, host=st.none() | facts, count=st.none() | st.integers(0, 3))
    def test_idle_only_when_every_view_shows_it(
        self, container: GpuFacts, host: GpuFacts | None, count: int | None
    ) -> None:
        verdict = judge(Expected(count=count), container, host)
        assert verdict.lines
        if verdict.status is not Status.IDLE:
            return
        for seen in (container, host):
            if seen is None or seen.state == NO_NVIDIA_SMI:
                continue
            assert seen.state == OK
            assert seen.table in (TABLE_EMPTY, TABLE_NAMED)
            for one in container.cards:
                twins = [other for other in seen.cards if other.uuid == one.uuid]
                assert twins
                for twin in twins:
                    assert len(twin.samples) >= 3
                    assert all(s.memory_mib is not None and s.memory_mib <= 64 for s in twin.samples)
                    assert all(s.utilization is not None and s.utilization <= 5 for s in twin.samples)
        assert not container.processes
