"""Settings of the gateway: what `RoleSettings` has for all roles, and what only the front needs."""

from typing import ClassVar

from pydantic import Field

from kvrelay.serving.settings import RoleSettings


class GatewaySettings(RoleSettings):
    """The front of a kvrelay cluster: public API, admission, routing."""

    section: ClassVar[str] = "gateway"

    port: int = Field(50051, ge=0, le=65535, description="port of the public API and of worker registration")
    http_port: int | None = Field(
        None, ge=0, le=65535, description="port of the OpenAI-compatible HTTP API; 0: any free one; default: none"
    )
    max_body_bytes: int = Field(
        32 * 1024 * 1024, ge=1, description="longest body of an HTTP request; longer ones are refused unread"
    )
    model: str = Field("smollm2", description="model served: smollm2, a folder, a .gguf file or a Hugging Face id")
    served_model_name: str | None = Field(None, description="name that requests and workers use; default: the model's")
    instance_id: str = Field("", description="name that tells this process from others; default: random")
    max_running_requests: int = Field(256, ge=1, description="most completions that run at once")
    max_queued_requests: int = Field(1024, ge=0, description="most requests that wait for admission; more are shed")
    queue_timeout_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="longest wait for admission before a request is shed"
    )
    local_prefill_max_tokens: int = Field(
        16, ge=0, description="an uncached prompt rest of at most this many tokens is prefilled by decode itself"
    )
    max_prefill_tokens: int = Field(
        8_192,
        ge=1,
        description="prompt tokens that each prefill worker gets ahead; prompts beyond it wait here, where they hold no"
        " KV blocks",
    )
    max_attempts: int = Field(3, ge=1, description="most attempts at a request when workers fail")
    worker_wait_s: float = Field(
        5.0, ge=0, allow_inf_nan=False, description="how long another attempt waits for a decode worker to come back"
    )
    max_prompt_bytes: int = Field(
        16 * 1024 * 1024, ge=1, description="longest prompt text in bytes, whatever the model's context"
    )
    write_timeout_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="how long a client may not read before its request is ended"
    )
    keep_alive_interval_s: float = Field(
        2.0, gt=0, allow_inf_nan=False, description="how often workers report; three missed reports end a registration"
    )
    session_ready_timeout_s: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="longest wait for a worker's greeting on a new session"
    )
    worker_silence_s: float = Field(
        5.0,
        gt=1,
        allow_inf_nan=False,
        description="how long nothing may be heard of a worker, which reports every second, before others take over its"
        " requests",
    )
    prefix_affinity_entries: int = Field(
        65_536, ge=0, description="prompt prefixes whose worker is remembered per tier; 0 turns affinity off"
    )
