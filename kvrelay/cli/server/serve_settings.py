"""Settings of `kvrelay serve` and `kvrelay check`: a whole local cluster.

Owns what is handed on to the roles, and the check that every key of a `--config` file is known to one of them.
"""

import difflib
from pathlib import Path
from typing import ClassVar, Final, Literal

import yaml
from pydantic import Field

from engine.config import KvDtype
from kvrelay.cluster.local import ClusterConfig
from kvrelay.errors import InvalidRequest
from kvrelay.serving.settings import SECTIONS, RoleSettings, flag_name

_TO_WORKERS: Final = (
    "transport",
    "device",
    "compute",
    "dtype",
    "weight_format",
    "gpu_memory_share",
    "threads",
    "num_blocks",
    "kv_memory_mib",
    "block_size",
    "kv_dtype",
    "speculation",
    "max_draft_tokens",
    "draft_model",
    "draft_head",
    "otlp_endpoint",
)
"""Handed on to every worker when they are given."""
_NVIDIA_DRIVER: Final = Path("/dev/nvidiactl")


class ServeSettings(RoleSettings):
    """A local cluster: one gateway, prefill and decode workers."""

    section: ClassVar[str] = "serve"

    port: int = Field(50051, ge=0, le=65535, description="port of the gateway; 0 takes any free one")
    http_port: int | None = Field(
        8000, ge=0, le=65535, description="port of the OpenAI-compatible HTTP API; 0 takes any free one"
    )
    model: str = Field("smollm2", description="model served: smollm2, a folder, a .gguf file or a Hugging Face id")
    prefill: int = Field(1, ge=0, le=64, description="number of prefill workers; 0 lets decode workers prefill")
    decode: int = Field(1, ge=1, le=64, description="number of decode workers")
    transport: Literal["auto", "shm", "grpc", "ucx"] = Field(
        "auto", description="how KV blocks travel; auto takes the best that both sides have"
    )
    device: str | None = Field(None, description="where the model runs: cpu, cuda, cuda:0; default: each role's")
    compute: Literal["auto", "native", "torch", "triton"] | None = Field(
        None, description="kernels: native (CPU), triton (GPU) or torch; default: each role's"
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] | None = Field(
        None, description="type of activations on a GPU; default: each role's"
    )
    weight_format: Literal["dense", "int8", "fp8", "int4"] | None = Field(
        None, description="how the layers' matrices are kept on a GPU; default: each role's"
    )
    gpu_memory_share: float | None = Field(
        None, gt=0.0, le=1.0, description="share of a GPU's memory for each worker; default: an equal share for all"
    )
    threads: int | None = Field(None, ge=0, description="compute threads of each worker; default: each role's")
    num_blocks: int | None = Field(None, ge=1, description="KV blocks of each worker; default: from --kv-memory-mib")
    kv_memory_mib: int | None = Field(None, ge=1, description="memory for KV blocks of each worker in MiB")
    block_size: int | None = Field(None, description="tokens in a KV block: 8, 16, 32 or 64")
    kv_dtype: KvDtype | None = Field(None, description="element type of the KV cache; default: each role's")
    speculation: Literal["none", "ngram", "draft", "eagle", "auto"] | None = Field(
        None, description="how tokens are drafted; the tokens that come out are the same; default: each role's"
    )
    max_draft_tokens: int | None = Field(
        None, ge=1, le=32, description="most tokens drafted for one sequence in a step; default: each role's"
    )
    draft_model: str | None = Field(None, description="smaller model with the same tokenizer, for --speculation draft")
    draft_head: str | None = Field(None, description="file of the draft head for --speculation eagle and auto")
    run_dir: Path | None = Field(None, description="where sockets and logs go; default: a new private directory")
    ready_timeout_s: float = Field(
        300.0, gt=0, allow_inf_nan=False, description="longest wait for the whole cluster to be ready"
    )

    def to_cluster(self, config: Path | None) -> ClusterConfig:
        """Return the cluster that these settings ask for.

        Args:
            config: The `--config` file, whose sections the roles read themselves.
        """
        sections = read_sections(config)
        worker_args = {role: _section_args(config, role, sections) for role in ("prefill", "decode")}
        for role, args in worker_args.items():
            for name in _TO_WORKERS:
                value = getattr(self, name) if name in self.model_fields_set else None
                if name == "gpu_memory_share" and value is None:
                    value = self._equal_share()
                # What a role's own section says is meant for that role alone, and wins.
                if value is not None and name not in sections.get(role, ()):
                    args += [flag_name(name), str(value)]
        gateway_args = _section_args(config, "gateway", sections)
        has_own_http = "http_port" in sections.get("gateway", ())
        if self.otlp_endpoint:
            gateway_args += ["--otlp-endpoint", self.otlp_endpoint]
        return ClusterConfig(
            model=self.model,
            num_prefill=self.prefill,
            num_decode=self.decode,
            host=self.host,
            port=self.port,
            http_port=None if has_own_http else self.http_port,
            gateway_args=gateway_args,
            prefill_args=worker_args["prefill"],
            decode_args=worker_args["decode"],
            log_level=self.log_level,
            run_dir=self.run_dir,
            restarts=True,
            ready_timeout_s=self.ready_timeout_s,
            drain_timeout_s=self.drain_timeout_s,
        )

    def _equal_share(self) -> float | None:
        """What each worker may take of a GPU that they all share; None where there is none or only one worker."""
        num_workers = self.prefill + self.decode
        wanted = self.device or "auto"
        has_gpu = wanted.startswith("cuda") or (wanted == "auto" and _NVIDIA_DRIVER.exists())
        return round(1.0 / num_workers, 4) if has_gpu and num_workers > 1 else None


def _section_args(config: Path | None, role: str, sections: dict[str, frozenset[str]]) -> list[str]:
    return ["--config", str(config)] if config is not None and role in sections else []


def read_sections(config: Path | None) -> dict[str, frozenset[str]]:
    """Return the keys of each role's section of a file that has been read once without error."""
    if config is None:
        return {}
    content = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    return {name: frozenset(content[name] or {}) for name in SECTIONS if name in content}


def check_keys(config: Path) -> None:
    """Make sure that every key of a cluster's file is known to a role that reads it.

    Raises:
        InvalidRequest: One is not; names `config`.
    """
    from decode_service.settings import DecodeSettings
    from gateway.settings import GatewaySettings
    from prefill_service.settings import PrefillSettings

    roles: tuple[type[RoleSettings], ...] = (GatewaySettings, PrefillSettings, DecodeSettings, ServeSettings)
    known = {role.section: frozenset(role.model_fields) for role in roles}
    content = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    everything = frozenset().union(*known.values())
    for key, value in content.items():
        if key in SECTIONS:
            for inner in value or {}:
                _check_key(config, f"{key}.{inner}", inner, known[key])
        else:
            _check_key(config, key, key, everything)


def _check_key(config: Path, shown: str, key: str, known: frozenset[str]) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InvalidRequest("config", f"unknown key {shown!r} in {config}{hint}")
