"""What a target may be told in hosts.yaml, as validated, frozen models. `hosts` reads the file into these."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import pydantic
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
DEFAULT_ROOT = "~/.local/share/dflash-ops"


def _absolute(value: str) -> str:
    if not value.startswith(("/", "~/")):
        raise ValueError(f"{value!r} is a relative path; write it from / or ~/")
    if ".." in value.split("/"):
        raise ValueError(f"{value!r} holds '..'; write the path out")
    return value.rstrip("/") or "/"


def _name(value: str) -> str:
    if not NAME.match(value):
        raise ValueError(f"{value!r} is no name; use letters, digits, _ . and -, at most 64")
    return value


def _host(value: str) -> str:
    if not re.match(r"[A-Za-z0-9:][A-Za-z0-9.:-]{0,252}\Z", value):
        raise ValueError(f"{value!r} is no host name or address")
    return value


def _cache_path(value: str) -> str:
    if not re.match(r"/tmp/torchinductor_[A-Za-z0-9_.-]+\Z", value):
        raise ValueError(f"{value!r} may not be cleared; only /tmp/torchinductor_NAME may")
    return value


AbsolutePath = Annotated[StrictStr, AfterValidator(_absolute)]
Name = Annotated[StrictStr, AfterValidator(_name)]
Count = Annotated[StrictInt, Field(ge=0, le=64)]
Seconds = Annotated[StrictInt, Field(ge=1, le=600)]
GpuIndex = Annotated[StrictInt, Field(ge=0, le=63)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Ssh(_Model):
    """How to reach the host."""

    host: Annotated[StrictStr, AfterValidator(_host)]
    user: Name | None = None
    """None: what ssh_config says, else the operator's own name."""
    port: Annotated[StrictInt, Field(ge=1, le=65535)] | None = None
    """None: what ssh_config says, else 22."""
    connect_timeout: Seconds = 10
    known_hosts: AbsolutePath = "~/.ssh/known_hosts"
    identity: AbsolutePath | None = None
    """A private key file; None: the agent and the default keys."""
    config: AbsolutePath | None = None
    """An ssh_config to read (ProxyJump and the like); None: ~/.ssh/config."""


class Roles(_Model):
    """GPU indices, in PCI bus order, of each role."""

    target: tuple[GpuIndex, ...]
    drafter: tuple[GpuIndex, ...]
    verifier: tuple[GpuIndex, ...] = ()


class Gpus(_Model):
    """How many GPUs the target must show, and what each is for."""

    count: Count
    roles: Roles | None = None

    @pydantic.model_validator(mode="after")
    def _indices_exist(self) -> Gpus:
        if self.roles is not None:
            indices = (*self.roles.target, *self.roles.drafter, *self.roles.verifier)
            if not self.roles.target or not self.roles.drafter:
                raise ValueError("roles.target and roles.drafter need at least one GPU each")
            if max(indices) >= self.count:
                raise ValueError(
                    f"roles name GPU {max(indices)}, but count is {self.count}: the last is {self.count - 1}"
                )
        return self


class Idle(_Model):
    """What an idle GPU may show at most, over how many samples."""

    memory_mib: Annotated[StrictInt, Field(ge=0, le=1_000_000)] = 64
    utilization: Annotated[StrictInt, Field(ge=0, le=100)] = 5
    samples: Annotated[StrictInt, Field(ge=1, le=60)] = 3


Scalar = StrictBool | StrictInt | StrictFloat | StrictStr | None


class Target(_Model):
    """One target, whole. `name` is its key in the file."""

    name: Name
    via: Literal["local", "ssh", "pct"]
    ssh: Ssh | None = None
    vmid: Annotated[StrictInt, Field(ge=1, le=999_999_999)] | None = None
    pct: AbsolutePath = "/usr/sbin/pct"
    python: AbsolutePath = "/usr/bin/python3"
    root: AbsolutePath = DEFAULT_ROOT
    workspace: AbsolutePath = ""
    launcher: Literal["auto", "tmux", "nohup", "systemd"] = "auto"
    """`auto`: tmux where it is installed, else nohup."""
    session: Name = "dflash"
    gpus: Gpus | None = None
    idle: Idle = Idle()
    env: dict[Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], StrictStr] = {}
    train: dict[Annotated[StrictStr, Field(pattern=r"^[a-z][a-z0-9_.]*$")], Scalar | tuple[Scalar, ...]] = {}
    """Overrides of the trainer's configuration on this target, by dotted key."""
    min_free_gib: Annotated[StrictInt, Field(ge=0, le=1_000_000)] = 1
    legacy_caches: tuple[Annotated[StrictStr, AfterValidator(_cache_path)], ...] = ()
    """Compile caches outside the root that `launch` clears too, such as /tmp/torchinductor_root."""

    @pydantic.model_validator(mode="after")
    def _route_is_whole(self) -> Target:
        if self.via == "local":
            if self.ssh or self.vmid:
                raise ValueError("via: local takes neither ssh: nor vmid:")
        else:
            if self.ssh is None:
                raise ValueError(f"via: {self.via} needs ssh: {{host: ...}}")
            if not self.python.startswith("/"):
                raise ValueError(f"python: {self.python!r} must begin with / on a remote target")
        if self.via == "pct" and self.vmid is None:
            raise ValueError("via: pct needs vmid:, the container's number on the Proxmox host")
        if self.via == "ssh" and self.vmid is not None:
            raise ValueError("via: ssh takes no vmid:; write via: pct to go on into a container")
        return self


class HostsFile(_Model):
    """The file, validated."""

    default: Name
    targets: dict[str, Target] = Field(min_length=1)
