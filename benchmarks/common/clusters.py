"""Local clusters to measure: real processes, started once and kept while variants take turns."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import get_args

from benchmarks.common.progress import BenchProgress
from benchmarks.common.prompts import PromptSource
from benchmarks.common.stream import run_request, wait_idle
from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster
from worker.settings import WorkerSettings

WARM_UP_PROMPT_TOKENS = (600, 40)
"""Longer than a step's budget, and short: both kinds of step have then run once."""
WARM_UP_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What one cluster under test consists of."""

    model: str = "smollm2"
    num_prefill: int = 1
    """0: the decode worker prefills its requests itself, in one process."""
    num_decode: int = 1
    transport: str = "auto"
    worker_args: tuple[str, ...] = ()
    """More flags for all workers."""

    def with_args(self, *args: str) -> "ClusterPlan":
        """Return the same cluster with more worker flags; the last of equal flags counts."""
        return replace(self, worker_args=(*self.worker_args, *args))

    def to_config(self) -> ClusterConfig:
        """Return what `LocalCluster` takes."""
        return ClusterConfig(
            model=self.model,
            num_prefill=self.num_prefill,
            num_decode=self.num_decode,
            worker_args=("--transport", self.transport, *self.worker_args),
            log_level="warning",
        )


@asynccontextmanager
async def running_cluster(plan: ClusterPlan, progress: BenchProgress, name: str) -> AsyncIterator[AsyncClient]:
    """Run a cluster around the block; gives a client of its gateway.

    Raises:
        ClusterError: It does not start.
    """
    progress.say(f"starting {name}")
    async with LocalCluster(plan.to_config()) as cluster, AsyncClient(cluster.target) as client:
        yield client


@asynccontextmanager
async def running_clusters(
    plans: dict[str, ClusterPlan], progress: BenchProgress
) -> AsyncIterator[dict[str, AsyncClient]]:
    """Run several clusters at once; an idle one takes no time from the one that is measured."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(running_cluster(plan, progress, name)) for name, plan in plans.items()
        }


async def warm_up(client: AsyncClient, prompts: PromptSource, longest_tokens: int | None = None) -> None:
    """Serve a long and a short request, so that nothing measured is the first of its kind."""
    for num_tokens in WARM_UP_PROMPT_TOKENS:
        token_ids = prompts.cut(min(num_tokens, longest_tokens or num_tokens), f"warm-up {num_tokens}")
        await run_request(client, token_ids, max_tokens=WARM_UP_OUTPUT_TOKENS, cache_salt="warm-up")
    await wait_idle(client)


def has_worker_setting(name: str) -> bool:
    """Whether workers know a setting; benchmarks leave out variants that this version cannot run."""
    return name in WorkerSettings.model_fields


def setting_choices(name: str) -> Sequence[str]:
    """Return the values that a worker setting takes, or () where there is no such closed setting."""
    field = WorkerSettings.model_fields.get(name)
    return tuple(str(choice) for choice in get_args(field.annotation)) if field is not None else ()
