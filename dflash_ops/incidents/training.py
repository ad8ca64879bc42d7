"""What goes wrong inside the trainer: compilation, memory, numbers, data."""

from __future__ import annotations

from dflash_ops.incidents.evidence import Source
from dflash_ops.incidents.signature import Incident, seen

LOG, EXIT, METRICS = Source.LOG, Source.EXIT, Source.METRICS
KERNEL, FACTS, FAILURE = Source.KERNEL, Source.FACTS, Source.FAILURE

_CACHE = r"(?:inductor|/triton|fxgraph|aotautograd)"

COMPILATION = (
    Incident(
        name="compile-race",
        cause="two threads compiled, or one called a compiled function while another compiled it",
        signatures=(
            seen(LOG, r"Detected that you are using FX to symbolically trace", weight=3),
            seen(LOG, r"state changed while dynamo tracing", weight=3),
            seen(LOG, r"fullgraph=True found no compiled frames", weight=2),
            seen(LOG, r"warm-up hung|warm-?up of .{0,120}(?:exceeded|deadline|did not (?:finish|end))", weight=3),
            seen(METRICS, r'"reason"\s*:\s*"gate_deadline"', weight=3),
        ),
        runbook="compile-race",
        next_command="fab tail-log --run RUN --lines 400 --no-follow",
        retryable=True,
        explains=("cuda-fault",),
    ),
    Incident(
        name="dense-attention",
        cause="flex_attention ran outside its compiled graph and built the whole score matrix",
        signatures=(
            seen(LOG, r"\bsdpa_dense(?:_backward)?\b", weight=3, also=r"OutOfMemoryError|CUDA out of memory"),
            seen(LOG, r"flex_attention called without torch\.compile\(\)", weight=3),
            seen(LOG, r"Tried to allocate (?:[1-9]\d{2,}(?:\.\d+)? GiB|[\d.]+ TiB)", weight=3),
            seen(LOG, r"flex_attention (?:ran|was called|reached) (?:eagerly|outside)", weight=3),
        ),
        runbook="dense-attention",
        next_command="fab tail-log --run RUN --lines 400 --no-follow",
        retryable=False,
        explains=("cuda-oom",),
    ),
    Incident(
        name="graph-tree-thread",
        cause="compiler-managed CUDA graphs were used in a thread that this torch cannot serve",
        signatures=(seen(LOG, r"_is_key_in_tls\(attr_name\)", weight=3),),
        runbook="graph-tree-thread",
        next_command="fab launch --variant threadwarm --resume RUN",
        retryable=False,
    ),
    Incident(
        name="recompile-limit",
        cause="a guard kept failing until the compiler gave up on the function, for every thread",
        signatures=(
            seen(LOG, r"torch\._dynamo hit config\.(?:accumulated_)?(?:recompile|cache_size)_limit", weight=3),
            seen(LOG, r"FailOnRecompileLimitHit|Hard failure due to fullgraph=True", weight=3),
            seen(LOG, r"Detected recompile when torch\.compile stance is", weight=3),
        ),
        runbook="recompile-limit",
        next_command="fab tail-log --run RUN --lines 400 --no-follow",
        retryable=False,
        explains=("dense-attention", "cuda-oom"),
    ),
    Incident(
        name="corrupt-compile-cache",
        cause="the compile cache holds a broken or half-deleted entry",
        signatures=(
            seen(
                LOG,
                r"(?:FileNotFoundError|No such file or directory|EOFError|UnpicklingError|BadZipFile).*" + _CACHE,
                r"(?:file too short|invalid ELF header|source code not available).*" + _CACHE,
                weight=3,
            ),
            seen(
                LOG,
                r"^\S*(?:EOFError|_pickle\.UnpicklingError|FileNotFoundError|OSError: .*file too short)",
                weight=2,
                also=r"torch/_inductor/(?:codecache|runtime)|triton/runtime/cache|triton/compiler",
            ),
        ),
        runbook="corrupt-compile-cache",
        next_command="fab clear-cache",
        retryable=True,
    ),
    Incident(
        name="graph-capture",
        cause="something unsafe ran while a CUDA graph was being captured",
        signatures=(
            seen(LOG, r"operation not permitted when stream is capturing", weight=3),
            seen(LOG, r"failed due to a previous error during capture", weight=2),
            seen(LOG, r"captures_underway|current_seed during CUDA graph capture", weight=2),
        ),
        runbook="graph-capture",
        next_command="fab launch --variant flex --resume RUN",
        retryable=True,
        explains=("cuda-fault",),
    ),
)

MEMORY_AND_NUMBERS = (
    Incident(
        name="cuda-oom",
        cause="a GPU ran out of memory",
        signatures=(seen(LOG, r"CUDA out of memory\. Tried to allocate|torch\.(?:cuda\.)?OutOfMemoryError", weight=2),),
        runbook="cuda-oom",
        next_command="fab gpus",
        retryable=False,
    ),
    Incident(
        name="host-oom",
        cause="the container's memory limit was hit and the kernel killed a process",
        signatures=(
            seen(
                KERNEL, r"Memory cgroup out of memory: Killed process|oom-kill:|Out of memory: Killed process", weight=3
            ),
            seen(FACTS, r"memory\.events: oom_kill rose", weight=3),
            seen(EXIT, r'"oom_kills?"\s*:\s*[1-9]', weight=3),
            seen(LOG, r"killed by signal: Killed|DataLoader worker .{0,40}Killed", weight=2),
        ),
        runbook="host-oom",
        next_command="fab doctor",
        retryable=False,
        explains=("run-lost",),
    ),
    Incident(
        name="memory-throttled",
        cause="the container is at memory.high: the kernel slows every allocation down, without an error",
        signatures=(seen(FACTS, r"memory\.events: high rose", weight=2),),
        runbook="memory-throttled",
        next_command="fab doctor",
        retryable=True,
        fatal=False,
    ),
    Incident(
        name="nan-loss",
        cause="the loss or the gradient stopped being finite",
        signatures=(
            seen(METRICS, r'"(?:loss|grad_norm)"\s*:\s*(?:NaN|-?Infinity|"(?:nan|-?inf)")', weight=3),
            seen(LOG, r"\bloss[ =:]+(?:nan|-?inf)\b", weight=3),
            seen(LOG, r"non-?finite (?:loss|gradient)|(?:loss|gradient norm) is (?:not finite|nan|inf)", weight=3),
        ),
        runbook="nan-loss",
        next_command="fab stop",
        retryable=False,
        fatal=False,
    ),
    Incident(
        name="no-valid-anchors",
        cause="no position of the data may start a block: the loss mask is empty, or documents are too short",
        signatures=(
            seen(
                LOG,
                r"no valid anchors?\b|no (?:row|document|position)s? (?:has|have|with) (?:a )?valid anchors?",
                r"no document with two consecutive supervised tokens",
                weight=3,
            ),
        ),
        runbook="no-valid-anchors",
        next_command="fab tail-log --run RUN --lines 100 --no-follow",
        retryable=False,
        explains=("data-refused",),
    ),
    Incident(
        name="data-refused",
        cause="the trainer refused its data: the proof says, in its words, which file and why",
        signatures=(
            # With the class's name where a thread of the run met it; at the start of a run the words come alone.
            seen(
                LOG,
                r"\bDataError: ",
                r"data\.source ['\"].{0,1000}['\"] (?:holds|does not exist|has other documents|is no file)\b",
                r" cannot be read(?: as (?:text|jsonl|arrow|parquet))?: ",
                r"changed since the checkpoint was made|fewer rows follow than when the checkpoint was made",
                r"is gone: the files changed|the data was tokenised for another model|leave data\.strict off",
                weight=2,
            ),
        ),
        runbook="data-refused",
        next_command="fab tail-log --run RUN --lines 100 --no-follow",
        retryable=False,
    ),
    Incident(
        name="checkpoint-corrupt",
        cause="a checkpoint is incomplete or does not match its hashes",
        signatures=(
            seen(
                LOG,
                r"CheckpointCorrupt",
                r"checkpoint.{0,200}(?:corrupt|incomplete|does not match|is truncated)",
                weight=3,
            ),
            seen(LOG, r"SafetensorError|Error while deserializing header", weight=2),
            seen(LOG, r"PytorchStreamReader failed|failed finding central directory", weight=2),
            seen(FAILURE, r"checkpoint .{0,200}(?:corrupt|incomplete|does not match|hash mismatch)", weight=3),
        ),
        runbook="checkpoint-corrupt",
        next_command="fab runs",
        retryable=False,
    ),
    Incident(
        name="disk-full",
        cause="a file system has no space or no inodes left",
        signatures=(
            seen(LOG, r"No space left on device|\[Errno 28\]|Disk quota exceeded", weight=3),
            seen(FAILURE, r"No space left on device|\[Errno 28\]|disk is full|disk: refused|no room for", weight=3),
            seen(FACTS, r"disk: full", weight=2),
        ),
        runbook="disk-full",
        next_command="fab doctor",
        retryable=False,
        explains=("checkpoint-corrupt", "corrupt-compile-cache", "stale-partial-release"),
    ),
)
