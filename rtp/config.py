"""Settings of the entry points: frozen models whose fields are the flags, the file's keys and the
help.

A later source wins: defaults, `--config FILE` (TOML), environment `RTP_*`, flags, `--set a.b=c`. A
key that is no field is an error everywhere, and so is a limit of nought or less (cases A01).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rtp.core.errors import ConfigError
from rtp.core.master.tenants import Terms
from rtp.core.types import Role
from rtp.io import addresses

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, lt=65536)]

MOST_TENANTS = 10_000

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Hosts that mean every address of this machine, and one of these."""


def option(default: Any, doc: str, group: str, unit: str = "") -> Any:  # Any: as pydantic's Field
    """A field with its help text, the group it is listed under, and what the help calls its value,
    where neither its choices nor the end of its name say that."""
    return Field(default, description=doc, json_schema_extra={"group": group, "unit": unit})


def checked_address(text: str) -> str:
    """For validators: the text, where it is a URL or host:port."""
    try:
        addresses.normal(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


class Settings(BaseModel):
    """Base: frozen, unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


def state_dir() -> Path:
    """Where secrets, logs and last numbers lie unless told otherwise: $XDG_STATE_HOME/rtp or
    ~/.local/state/rtp."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "rtp"


class Process(Settings):
    """What every process has."""

    host: str = option("127.0.0.1", "Address to listen on.", "server")
    secret_file: Path | None = option(
        None,
        "File (mode 0600) with the cluster secret that Master and workers share. Default, made when"
        " missing: cluster.secret in the state directory.",
        "security",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least severe log lines that are written.", "logging"
    )
    state: Path = Field(
        default_factory=state_dir,
        description="Directory for what outlives a process: the secret, logs, the last term and"
        " epoch.",
        json_schema_extra={"group": "process", "unit": "DIR"},
    )
    parent: int = Field(
        0,
        description="Pid of the process that started this one; it ends when that one ends.",
        json_schema_extra={"group": "process", "hidden": True},
    )

    @property
    def loopback(self) -> bool:
        return addresses.is_loopback(self.host)

    @property
    def secret_path(self) -> Path:
        return self.secret_file or self.state / "cluster.secret"

    def _missing_keys(self) -> Iterator[str]:
        """What has to be given before others may reach this process."""
        if self.secret_file is None:
            yield "secret_file (the cluster secret that Master and workers share)"

    @model_validator(mode="after")
    def _closed_to_the_world(self) -> Self:
        missing = [] if self.loopback else list(self._missing_keys())
        if missing:
            raise ValueError(
                f"host {self.host} can be reached from outside; give {' and '.join(missing)},"
                " or listen on 127.0.0.1 (README, Security)"
            )
        return self


class Plugin(Settings):
    """A choice by name, and its parameters."""

    name: str = option("", "File name of the plugin, or a dotted path.", "scheduling")
    params: dict[str, Any] = option({}, "Its parameters (--set).", "scheduling")


class RoutingPlugin(Plugin):
    """Where requests go. Has its name by default, so that parameters alone are for this one."""

    name: str = option("predicted_ttft", "File name of the plugin, or a dotted path.", "scheduling")


class TransportPlugin(Plugin):
    """What moves KV pages between workers."""

    name: str = option(
        "", "What moves KV pages; default: the first that can move the backend's.", "cluster"
    )
    params: dict[str, Any] = option({}, "Its parameters (--set).", "cluster")


class Public(Process):
    """A process that clients talk to."""

    port: Port = option(8000, "Port of the HTTP API; 0 takes a free one.", "server")
    api_key_file: Path | None = option(
        None,
        "File with lines `KEY` or `KEY TENANT`; clients then need a key. $RTP_API_KEY adds one.",
        "security",
    )
    max_body_bytes: Positive = option(32 << 20, "Larger request bodies get a 413.", "server")

    def _missing_keys(self) -> Iterator[str]:
        yield from super()._missing_keys()
        if self.api_key_file is None and not os.environ.get("RTP_API_KEY"):
            yield "api_key_file or $RTP_API_KEY (the keys of clients)"


class Tenant(Settings):
    """What one tenant may use. Tokens are prompt tokens to compute and output tokens."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = option(
        1.0, "Its share of service while several tenants wait, relative to others'.", "tenants", "W"
    )
    tokens_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = option(
        None, "More get a 429, with the time until they pass.", "tenants", "TOKENS"
    )
    burst_tokens: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = option(
        None, "Used at once after a pause; default: 10 s of tokens_per_s.", "tenants", "TOKENS"
    )
    max_waiting: Positive | None = option(
        None, "Requests of it that may wait for a rank of one model.", "tenants", "REQUESTS"
    )

    def terms(self) -> Terms:
        return Terms(**self.model_dump())

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        try:
            self.terms()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self


class Scheduling(Settings):
    """How the Master admits and places."""

    routing: RoutingPlugin = RoutingPlugin()
    limits: bool = option(
        True, "false switches off the limits of queue, TTFT and tenants.", "admission"
    )
    max_queue_requests: Positive = option(
        4096, "Requests that may wait for a rank; more get a 429.", "admission"
    )
    max_queue_tokens: Positive = option(
        16 << 20, "Prompt tokens that may wait for a rank; more get a 429.", "admission"
    )
    schedule_lease_s: Seconds = option(
        60.0,
        "How long a place given by POST /v1/schedule stays charged unless its caller renews it or"
        " is done.",
        "scheduling",
    )
    max_ttft_s: Seconds | None = option(
        None, "Refuse (503) what is predicted to wait longer for its first token.", "admission"
    )
    default_tenant: Tenant = Tenant()
    """Of each tenant without terms of its own."""
    tenants: dict[str, Tenant] = Field(
        {},
        max_length=MOST_TENANTS,
        description="Terms by tenant, as named in api_key_file (--set or file).",
        json_schema_extra={"group": "tenants"},
    )


class MasterConfig(Public, Scheduling):
    """`python -m rtp.master`: the Master, a frontend and the HTTP API in one process."""

    frontend: bool = option(
        True, "Serve clients here; false leaves them to rtp.frontend processes.", "server"
    )
    workers: tuple[str, ...] = option(
        (),
        "Addresses of workers to ask, comma separated; others register themselves.",
        "cluster",
        "HOST:PORT,...",
    )
    drain_s: Seconds = option(
        10.0, "How long Ctrl-C or SIGTERM lets running requests go on.", "process"
    )


class FrontendConfig(Public):
    """`python -m rtp.frontend`: the HTTP API in a process of its own; it keeps nothing."""

    port: Port = option(8001, "Port of the HTTP API; 0 takes a free one.", "server")
    master: str = option("http://127.0.0.1:8000", "Where the Master is.", "cluster", "URL")
    drain_s: Seconds = option(
        10.0, "How long Ctrl-C or SIGTERM lets running requests go on.", "process"
    )

    @field_validator("master")
    @classmethod
    def _is_an_address(cls, text: str) -> str:
        if text.lower().startswith("https:"):
            raise ValueError(f"{text}: frontends speak to the Master without TLS; give http://")
        return checked_address(text)


class Model(Settings):
    """What a worker runs; shared by rtp.worker and rtp.local."""

    model: str = option("smollm2-135m", "Name of a known model, or path of a checkpoint.", "model")
    served_name: str = option(
        "", "Name that clients ask for; default: the model's own, or sim.", "model"
    )
    backend: str = option("torch_cpu", "Backend plugin that runs the model.", "model", "NAME")
    dtype: Literal["auto", "bf16", "fp32"] = option(
        "auto", "Type of weights and KV; auto takes what this CPU multiplies fastest.", "model"
    )
    block_size: Positive = option(16, "Tokens of a KV block.", "model", "TOKENS")
    kv_tokens: Positive | None = option(
        None, "Tokens the KV cache of a rank holds; default: the backend's.", "model"
    )
    max_model_len: Positive | None = option(
        None, "Longest sequence in tokens; default: the model's own.", "model", "TOKENS"
    )
    max_batch_tokens: Positive = option(
        512, "Tokens one step may compute: long prompts are cut into chunks of it.", "batching"
    )
    chunk_while_decoding: Positive = option(
        128,
        "Prompt tokens a step may add to rows that decode; less is smoother.",
        "batching",
        "TOKENS",
    )
    max_rows: Positive = option(64, "Rows of one step.", "batching")
    steps_in_flight: Annotated[int, Field(ge=1, le=2)] = option(
        1, "Steps handed to the backend before the first is done.", "batching", "STEPS"
    )
    params: dict[str, Any] = option({}, "Further parameters of the backend (--set).", "model")


class WorkerConfig(Process, Model):
    """`python -m rtp.worker`: one worker, its control process and one process per rank."""

    port: Port = option(0, "Port for Master and frontends; 0 takes a free one.", "server")
    master: str = option("http://127.0.0.1:8000", "Where to register.", "cluster", "URL")
    advertise: str = option(
        "",
        "host:port under which others reach this worker; default: host and port.",
        "cluster",
        "HOST:PORT",
    )
    worker_id: str = option(
        "", "Name that lasts over restarts; default: from host and port.", "cluster", "NAME"
    )
    role: Role = option(
        Role.FUSION,
        "fusion runs requests from beginning to end; prefill computes prompts and hands them over,"
        " decode goes on from there; encode serves none so far.",
        "cluster",
    )
    transport: TransportPlugin = TransportPlugin()
    dp: Positive = option(1, "Ranks: copies of the model, each with its own KV.", "model", "RANKS")
    lockstep: bool = option(
        False, "Ranks step together, as experts spread over the ranks need it.", "model"
    )
    threads: Positive | None = option(
        None, "Threads that compute, per rank; default: all cores over the ranks.", "model"
    )
    drain_s: Seconds = option(
        10.0, "How long Ctrl-C or SIGTERM lets running requests go on.", "process"
    )
    profile: Path | None = option(
        None, "Measure what steps cost here, write it as a profile for replays, and end.", "process"
    )

    @field_validator("master", "advertise")
    @classmethod
    def _is_an_address(cls, text: str) -> str:
        return checked_address(text) if text else text

    def _missing_keys(self) -> Iterator[str]:
        yield from super()._missing_keys()
        if self.host in EVERYWHERE and not self.advertise:
            yield "advertise (the host:port to dial, which this one is not)"


class LocalConfig(Public, Scheduling, Model):
    """`python -m rtp.local`: a Master and workers on this machine, supervised."""

    workers: Positive = option(2, "Workers to run.", "cluster", "N")
    prefill: Annotated[int, Field(ge=0)] = option(
        0,
        "So many of them compute prompts only and hand over (backend sim so far).",
        "cluster",
        "N",
    )
    decode: Annotated[int, Field(ge=0)] = option(
        0, "So many of them go on with what those hand over.", "cluster", "N"
    )
    frontends: Annotated[int, Field(ge=0)] = option(
        0, "Further frontends, each a process on one of the ports behind --port.", "cluster", "N"
    )
    threads: Positive | None = option(
        None, "Threads that compute, per worker; default: cores over workers.", "model"
    )
    ask: bool = option(True, "Ask the model an example question when it is ready.", "process")
    drain_s: Seconds = option(
        5.0, "How long Ctrl-C or SIGTERM lets running requests go on.", "process"
    )

    @property
    def roles(self) -> tuple[Role, ...]:
        """One for each worker."""
        fused = self.workers - self.prefill - self.decode
        return (
            (Role.PREFILL,) * self.prefill + (Role.DECODE,) * self.decode + (Role.FUSION,) * fused
        )

    @model_validator(mode="after")
    def _roles_fit(self) -> Self:
        if self.prefill + self.decode > self.workers:
            raise ValueError(
                f"{self.prefill} prefill and {self.decode} decode workers are more"
                f" than workers, {self.workers}"
            )
        if self.prefill and not self.decode:
            raise ValueError("prefill workers need decode workers to hand over to")
        return self

    @property
    def own_host(self) -> str:
        """Where this machine reaches what listens on `host`."""
        return EVERYWHERE.get(self.host, self.host)

    @model_validator(mode="after")
    def _reaches_itself(self) -> Self:
        if not addresses.is_loopback(self.own_host):
            raise ValueError(
                f"host {self.host}: take a loopback address or all ({', '.join(EVERYWHERE)})"
            )
        return self
