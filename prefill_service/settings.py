"""PrefillSettings: what a prefill worker is told."""

from typing import ClassVar

from pydantic import Field

from worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Compute prompts and stream their KV to decode workers."""

    section: ClassVar[str] = "prefill"

    commit_timeout_s: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="longest wait for a decode worker to verify and take over KV"
    )
    cuda_graphs: bool = Field(False, description="whether decode steps are captured as CUDA graphs at start-up")
    nice: int = Field(
        5, ge=0, le=19, description="OS priority of this process; prefill yields to decode on shared cores"
    )
