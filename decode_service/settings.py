"""DecodeSettings: what a decode worker is told."""

from typing import ClassVar

from pydantic import Field

from worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Reserve KV blocks, take over prefilled sequences and generate."""

    section: ClassVar[str] = "decode"

    lease_ttl_s: float = Field(
        60.0, gt=0, allow_inf_nan=False, description="longest time a reservation lives without news of its hand-off"
    )
    max_queued_reservations: int = Field(
        256, ge=0, description="most requests that wait here for KV blocks; beyond it they are shed"
    )
    reservation_timeout_s: float = Field(
        30.0, gt=0, allow_inf_nan=False, description="longest wait for KV blocks before a request is shed"
    )
