"""WorkerSettings: what both tiers' workers are told. Each tier derives its own from it."""

import os
import secrets
import socket
from typing import Literal

from pydantic import Field, field_validator

from engine.config import KvDtype
from engine.serving.settings import RoleSettings

TransportChoice = Literal["auto", "shm", "ucx", "grpc"]


class WorkerSettings(RoleSettings):
    """Run one worker."""

    model: str = Field("smollm2", description="smollm2, a .gguf file, a Hugging Face folder or a Hugging Face id")
    served_model_name: str = Field("", description="name that requests use; the same on every role; default: --model's")
    gateway: str = Field("127.0.0.1:50051", description="gateway to register with, host:port")
    worker_id: str = Field("", description="name in the cluster, unique; default: role, host and a random part")
    advertise_host: str = Field("", description="host name that others reach this worker at; default: --host")
    transport: TransportChoice = Field("auto", description="how KV moves; auto takes the best that both sides share")
    run_dir: str = Field("", description="private directory for Unix sockets; default: none, abstract sockets are used")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    compute: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="CPU kernels: native is int8 arithmetic on quantized weights, torch is fp32; auto takes native for"
        " checkpoints that are quantized",
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0 = one per core")
    kv_memory_mib: int = Field(512, ge=1, description="memory for KV blocks in MiB, unless --num-blocks is given")
    num_blocks: int | None = Field(None, ge=1, description="number of KV blocks; default: what --kv-memory-mib holds")
    block_size: int = Field(16, description="tokens in a KV block: 8, 16, 32 or 64")
    kv_dtype: KvDtype = Field(KvDtype.FP32, description="element type of the KV cache")
    prefix_cache: bool = Field(True, description="whether KV of finished requests is reused for equal prefixes")
    max_num_seqs: int = Field(64, ge=1, description="most sequences in one step")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of one step, decodes first")
    max_waiting: int = Field(1024, ge=1, description="most requests that wait here; beyond it they are shed")
    speculation: Literal["none", "ngram"] = Field(
        "ngram", description="how tokens are drafted on the decode tier; the tokens that come out are the same"
    )
    max_draft_tokens: int = Field(8, ge=1, le=32, description="most tokens drafted for one sequence in a step")
    nice: int = Field(0, ge=0, le=19, description="OS priority of this process; higher yields to others")

    @field_validator("gateway")
    @classmethod
    def _has_port(cls, value: str) -> str:
        host, colon, port = value.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError("must be host:port")
        return value

    @field_validator("block_size")
    @classmethod
    def _is_known_size(cls, value: int) -> int:
        if value not in (8, 16, 32, 64):
            raise ValueError("must be 8, 16, 32 or 64")
        return value

    def resolved_worker_id(self, role: str) -> str:
        """Return the name to register under."""
        return self.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
