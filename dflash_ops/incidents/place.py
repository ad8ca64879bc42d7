"""What goes wrong around the trainer: the GPUs, the environment, the container, the way there."""

from __future__ import annotations

from dflash_ops.incidents.evidence import Source
from dflash_ops.incidents.signature import Incident, raised, seen

LOG, EXIT, GPU = Source.LOG, Source.EXIT, Source.GPU
KERNEL, FACTS, FAILURE = Source.KERNEL, Source.FACTS, Source.FAILURE

_SLOW_ON_PURPOSE = r"allow_slow_kernels=True|\bgpus +none"
"""A log header that says: no GPU here, or slow kernels were asked for."""

ENVIRONMENT = (
    Incident(
        name="missing-fast-kernels",
        cause="flash-linear-attention or causal-conv1d is not used: the target runs many times slower",
        signatures=(
            seen(
                LOG,
                r"fast path is not available because one of the required librar",
                weight=3,
                unless=_SLOW_ON_PURPOSE,
            ),
            seen(LOG, r"is falling back to its reference PyTorch implementation", weight=3, unless=_SLOW_ON_PURPOSE),
            seen(
                LOG,
                r"(?:flash-linear-attention|causal-conv1d).{0,80}(?:missing|not installed|cannot be imported|"
                r"not selected|required)",
                weight=3,
                unless=_SLOW_ON_PURPOSE,
            ),
            seen(
                FAILURE,
                r"missing: .{0,80}(?:flash-linear-attention|causal-conv1d)",
                r"(?:flash-linear-attention|causal-conv1d|fast kernels?).{0,80}(?:missing|not )",
                weight=3,
            ),
        ),
        runbook="missing-fast-kernels",
        next_command="fab doctor",
        retryable=False,
        fatal=False,
    ),
    Incident(
        name="driver-mismatch",
        cause="the NVIDIA driver inside the container is not the version of the host's kernel module",
        signatures=(
            seen(GPU, r"Driver/library version mismatch", weight=3),
            seen(FAILURE, r"Driver/library version mismatch", weight=3),
            seen(LOG, r"Driver/library version mismatch|system has unsupported display driver", weight=3),
            seen(KERNEL, r"NVRM: API mismatch", weight=3),
            seen(
                LOG,
                r"driver version is insufficient for CUDA runtime|NVIDIA driver on your system is too old",
                weight=3,
            ),
        ),
        runbook="driver-mismatch",
        next_command="fab doctor",
        retryable=False,
        explains=("uvm-missing", "gpu-lost"),
    ),
    Incident(
        name="uvm-missing",
        cause="/dev/nvidia-uvm is not in the container: nvidia-smi works, CUDA does not",
        signatures=(
            seen(FACTS, r"device: /dev/nvidia-uvm missing", weight=3),
            seen(FAILURE, r"Device /dev/nvidia-uvm does not exist|/dev/nvidia-uvm.{0,40}missing", weight=3),
            seen(LOG, r"CUDA unknown error - this may be due to an incorrectly set up environment", weight=2),
        ),
        runbook="uvm-missing",
        next_command="fab doctor",
        retryable=False,
        explains=("container-stopped",),
    ),
    Incident(
        name="gpu-lost",
        cause="a GPU left the bus or reported a hardware fault (Xid)",
        signatures=(
            seen(KERNEL, r"fallen off the bus|GPU .{0,40}is lost", weight=3),
            seen(KERNEL, r"NVRM: Xid .{0,60}: (?:48|62|63|64|74|79|92|94|95|119|120|140)\b", weight=3),
            seen(GPU, r"Unable to determine the device handle|GPU is lost|fallen off the bus", weight=3),
            seen(
                FAILURE,
                r"Unable to determine the device handle|GPU is lost|\d+ of \d+ GPUs (?:are )?(?:gone|missing)",
                weight=3,
            ),
            seen(FACTS, r"gpus: \d+ of \d+ present", weight=3),
            seen(LOG, r"uncorrectable ECC error encountered", weight=3),
        ),
        runbook="gpu-lost",
        next_command="fab gpus",
        retryable=False,
        explains=("cuda-fault", "compile-race"),
    ),
    Incident(
        name="cuda-fault",
        cause="a kernel faulted: every later CUDA call of the process fails, wherever it is",
        signatures=(
            seen(LOG, r"an illegal memory access was encountered|device-side assert triggered", weight=2),
            seen(
                LOG, r"CUDA error: (?:misaligned address|unspecified launch failure|an illegal instruction)", weight=2
            ),
            seen(KERNEL, r"NVRM: Xid .{0,60}: (?:13|31|43|45)\b", weight=1),
        ),
        runbook="cuda-fault",
        next_command="fab tail-log --run RUN --lines 400 --no-follow",
        retryable=True,
    ),
    Incident(
        name="gpu-busy",
        cause="a GPU is held by a process that the container cannot see",
        signatures=(
            raised("GateRefused", weight=1),
            seen(FAILURE, r"GPUs?\b.{0,160}\b(?:busy|in use|held by|holds)\b", weight=3),
            seen(FACTS, r"gpu: .{0,80}held by pid", weight=3),
            seen(LOG, r"all CUDA-capable devices are busy or unavailable", weight=3),
        ),
        runbook="gpu-busy",
        next_command="fab gpus",
        retryable=False,
        explains=("cuda-oom",),
    ),
    Incident(
        name="environment-mismatch",
        cause="Python, torch or a compiled extension is not the version that the trainer needs",
        signatures=(
            raised("EnvironmentUnfit", weight=1),
            seen(LOG, r"no kernel image is available for execution on the device", weight=3),
            seen(LOG, r"ImportError: .{0,200}undefined symbol", weight=3),
            seen(
                LOG,
                r"ModuleNotFoundError: No module named '?(?:torch|transformers|safetensors|numpy|triton)\b",
                weight=3,
            ),
            seen(
                LOG,
                r"(?:torch|Python|triton|transformers) \d+\.\d+\S* .{0,60}(?:is not supported|required|too old)",
                weight=3,
            ),
            seen(
                FAILURE,
                r"(?:torch|Python|triton|transformers) \d+\.\d+\S* .{0,80}(?:not supported|required|too old)",
                weight=3,
            ),
            seen(LOG, r"cannot import name .{0,80} from 'torch", weight=2),
        ),
        runbook="environment-unfit",
        next_command="fab doctor",
        retryable=False,
    ),
)

REACH = (
    Incident(
        name="stale-partial-release",
        cause="an upload was cut: a .partial release is left, the release in use was not touched",
        signatures=(
            raised("UploadCorrupt"),
            seen(
                FAILURE,
                r"releases/\S+\.partial|partial release|upload (?:was )?(?:cut|incomplete)|sha256 .{0,80}differs",
                weight=3,
            ),
        ),
        runbook="stale-partial-release",
        next_command="fab deploy",
        retryable=True,
    ),
    Incident(
        name="lock-held",
        cause="a live trainer or another launch holds the lock",
        signatures=(
            raised("LockHeld"),
            seen(FAILURE, r"\block\b.{0,80}\bheld\b|holds the lock|trainer (?:is )?already run", weight=3),
            seen(LOG, r"holds the lock|lock is held by", weight=3),
        ),
        runbook="lock-held",
        next_command="fab status",
        retryable=False,
    ),
    Incident(
        name="tmux-socket-lost",
        cause="tmux's socket was removed; the server and the run are alive",
        signatures=(
            seen(FAILURE, r"error connecting to \S+ \(No such file or directory\)|no server running on \S+", weight=3),
            seen(FACTS, r"tmux: server alive, socket missing", weight=3),
        ),
        runbook="tmux-socket-lost",
        next_command="fab status",
        retryable=True,
        fatal=False,
    ),
    Incident(
        name="container-stopped",
        cause="the container does not run",
        signatures=(
            raised("ContainerStopped", "ContainerMissing"),
            seen(FAILURE, r"container '?\d+'? (?:is )?not running|container \S+ is stopped|status: stopped", weight=3),
            seen(FAILURE, r"Configuration file 'nodes/\S+/lxc/\d+\.conf' does not exist", weight=3),
        ),
        runbook="container-stopped",
        next_command="fab status",
        retryable=True,
    ),
    Incident(
        name="container-restarted",
        cause="the container or its host restarted under the run",
        signatures=(seen(FACTS, r"state: lost \((?:container|host|container or host) restarted", weight=3),),
        runbook="container-restarted",
        next_command="fab launch --resume RUN",
        retryable=True,
        explains=("run-lost",),
    ),
    Incident(
        name="run-lost",
        cause="the trainer vanished without an exit record: it was killed, with its supervisor",
        signatures=(
            seen(FACTS, r"state: lost \(", weight=1),
            seen(EXIT, r'"signal"\s*:\s*(?:9|"SIGKILL")', weight=1),
        ),
        runbook="run-lost",
        next_command="fab launch --resume RUN",
        retryable=True,
    ),
    Incident(
        name="host-unreachable",
        cause="the host does not answer, or answers and refuses our keys",
        signatures=(
            raised("DeadlineExceeded", weight=1),
            raised("HostUnreachable", "AuthenticationFailed"),
            seen(
                FAILURE, r"(?:Connection (?:refused|timed out|reset)|No route to host|Network is unreachable)", weight=2
            ),
            seen(
                FAILURE, r"Name or service not known|could not resolve|Temporary failure in name resolution", weight=3
            ),
            seen(FAILURE, r"(?:cannot|could not) reach|Permission denied \(publickey|Authentication failed", weight=2),
            seen(FAILURE, r"no (?:answer|SSH banner) (?:from \S+ )?(?:with)?in \d+", weight=2),
        ),
        runbook="host-unreachable",
        next_command="fab status",
        retryable=True,
    ),
    Incident(
        name="host-key",
        cause="the host's key is unknown or not the one we know",
        signatures=(
            raised("HostKeyRefused", "HostKeyChanged"),
            seen(
                FAILURE,
                r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .{0,120}(?:changed|differs|does not match)",
                weight=3,
            ),
            seen(
                FAILURE,
                r"Host key verification failed|host key .{0,120}(?:unknown|not (?:known|in known_hosts))",
                weight=3,
            ),
        ),
        runbook="host-key",
        next_command="fab doctor",
        retryable=False,
        explains=("host-unreachable",),
    ),
    Incident(
        name="agent-failed",
        cause="Python is missing on the target, or the agent could not run there",
        signatures=(
            raised("AgentFailed", weight=1),
            seen(
                FAILURE,
                r"lxc-attach: .{0,120}Failed to exec|\bpython\S*: (?:not found|No such file or directory)",
                weight=3,
            ),
            seen(FAILURE, r"agent .{0,80}(?:did not answer|could not run|gave no frame)", weight=2),
        ),
        runbook="agent-failed",
        next_command="fab doctor",
        retryable=False,
    ),
)
