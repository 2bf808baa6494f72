"""WorkerSettings: what both tiers' workers are told. Each tier derives its own from it."""

import os
import secrets
import socket
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from engine.config import KvDtype
from kvrelay.errors import InvalidRequest
from kvrelay.serving.settings import RoleSettings
from kvrelay.target import parse_target

DEFAULT_KV_MEMORY_MIB = 512
"""Memory for KV blocks on the CPU."""

TransportChoice = Literal["auto", "shm", "ucx", "grpc"]


class WorkerSettings(RoleSettings):
    """Run one worker."""

    model: str = Field("smollm2", description="smollm2, a .gguf file, a Hugging Face folder or a Hugging Face id")
    served_model_name: str = Field("", description="name that requests use; the same on every role; default: --model's")
    gateway: str = Field("127.0.0.1:50051", description="gateway to register with, host:port")
    worker_id: str = Field("", description="name in the cluster, unique; default: role, host and a random part")
    advertise_host: str = Field(
        "",
        description="host name that others reach this worker at; default: --host, or if that is every interface, the"
        " address from which this worker reaches the gateway",
    )
    transport: TransportChoice = Field("auto", description="how KV moves; auto takes the best that both sides share")
    run_dir: str = Field("", description="private directory for Unix sockets; default: none, abstract sockets are used")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N")
    compute: Literal["auto", "native", "torch", "triton"] = Field(
        "auto",
        description="kernels: native is int8 arithmetic on quantized weights and runs on the CPU, triton runs on a GPU,"
        " torch is fp32 anywhere; auto takes triton on a GPU and native for quantized checkpoints",
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="type of activations and dense weights with triton; auto is bf16 on a GPU"
    )
    weight_format: Literal["dense", "int8", "fp8", "int4"] = Field(
        "dense", description="how triton keeps the layers' matrices; fp8 needs compute capability 8.9"
    )
    batch_invariant: bool = Field(
        False, description="with triton: a token's logits are the same bits whatever is computed beside it; slower"
    )
    cuda_graphs: bool = Field(True, description="whether decode steps are captured as CUDA graphs at start-up")
    gpu_memory_margin: float = Field(
        0.08, ge=0.0, lt=1.0, description="share of a GPU's memory that KV blocks leave free: activations, graphs"
    )
    gpu_memory_share: float = Field(
        1.0, gt=0.0, le=1.0, description="share of a GPU's memory for this worker, weights and KV; several share one"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the model; 0 = one per core")
    kv_memory_mib: int | None = Field(
        None,
        ge=1,
        description="memory for KV blocks in MiB, unless --num-blocks is given; default: 512 on the CPU, what"
        " --gpu-memory-margin leaves on a GPU",
    )
    num_blocks: int | None = Field(None, ge=1, description="number of KV blocks; default: what --kv-memory-mib holds")
    block_size: int = Field(16, description="tokens in a KV block: 8, 16, 32 or 64")
    kv_dtype: KvDtype | None = Field(
        None,
        description="element type of the KV cache; default: int8 with native kernels, fp32 with torch's, --dtype on a"
        " GPU",
    )
    prefix_cache: bool = Field(True, description="whether KV of finished requests is reused for equal prefixes")
    max_num_seqs: int = Field(64, ge=1, description="most sequences in one step; at most --max-num-batched-tokens")
    max_num_batched_tokens: int = Field(512, ge=1, description="token budget of one step, decodes first")
    max_waiting: int = Field(1024, ge=1, description="most requests that wait here; beyond it they are shed")
    speculation: Literal["none", "ngram", "draft", "eagle", "auto"] = Field(
        "ngram",
        description="how tokens are drafted on the decode tier: ngram looks them up in prompt, output and earlier"
        " requests, draft asks a smaller model, eagle a trained head on the model's hidden states, auto takes ngram or"
        " eagle, whichever promises more; the tokens that come out are the same",
    )
    draft_head: str = Field(
        "",
        description="file of the head for --speculation eagle and auto; default: the one that comes with kvrelay for"
        " this model. Prefill workers with the same head send its KV along",
    )
    max_draft_tokens: int = Field(16, ge=1, le=32, description="most tokens drafted for one sequence in a step")
    draft_model: str = Field(
        "", description="smaller model with the same tokenizer, named as for --model, for --speculation draft"
    )
    draft_kv_memory_mib: int = Field(128, ge=1, description="memory for KV blocks of the draft model in MiB")
    step_stall_s: float = Field(
        5.0,
        gt=0,
        allow_inf_nan=False,
        description="an engine step longer than this, and than five times the longest one before it, makes gateways use"
        " other workers until it ends; raise it where single steps take seconds",
    )
    step_limit_s: float = Field(
        300.0,
        ge=0,
        allow_inf_nan=False,
        description="an engine step longer than this ends the process, for its supervisor to start anew, and so does a"
        " process that was stopped for as long; 0 = never",
    )
    worker_control: bool = Field(
        False,
        description="whether Drain and FlushCache are served to everybody who reaches this worker's port; SIGTERM"
        " drains without it",
    )
    nice: int = Field(0, ge=0, le=19, description="OS priority of this process; higher yields to others")
    time_slice_us: int = Field(
        100,
        ge=0,
        le=100_000,
        description="longest time in microseconds that a thread keeps a core others wait for, where the system can"
        " (Linux 6.12 and later); 0 = the system's default",
    )

    @field_validator("gateway")
    @classmethod
    def _is_target(cls, value: str) -> str:
        try:
            target = parse_target(value, "gateway")
        except InvalidRequest as error:
            raise ValueError(error.description) from None
        # The route to it is looked up as well, so a name of gRPC's own resolvers will not do.
        if not target.rpartition(":")[2].isdigit():
            raise ValueError("must be host:port")
        return target

    @field_validator("block_size")
    @classmethod
    def _is_known_size(cls, value: int) -> int:
        if value not in (8, 16, 32, 64):
            raise ValueError("must be 8, 16, 32 or 64")
        return value

    @model_validator(mode="after")
    def _every_sequence_gets_a_token(self) -> Self:
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs: must be at most max_num_batched_tokens, {self.max_num_batched_tokens}, not"
                f" {self.max_num_seqs}: each sequence gets a token in every step"
            )
        return self

    def resolved_worker_id(self, role: str) -> str:
        """Return the name to register under."""
        return self.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
