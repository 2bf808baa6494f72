"""One local cluster of real processes with the real model, shared by the tests that leave it as they found it."""

from collections.abc import AsyncIterator

import pytest_asyncio

from kvrelay.client import AsyncClient
from kvrelay.cluster.local import ClusterConfig, LocalCluster


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="cluster")
async def fixture_cluster() -> AsyncIterator[LocalCluster]:
    async with LocalCluster(ClusterConfig()) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session", name="client")
async def fixture_client(cluster: LocalCluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.target) as client:
        yield client
