"""`kvrelay worker`: what it prints of a worker's answers, and its exit codes."""

import json
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from engine.worker_types import WorkerLoad
from kvrelay.v1 import worker_service_pb2 as pb
from kvrelay.v1 import worker_service_pb2_grpc
from kvrelay.wire.engine.workers import load_to_proto
from tests.unit.kvrelay.cli.test_cli import run


class FakeWorker(worker_service_pb2_grpc.WorkerServiceServicer):
    """Answers as it is told."""

    def __init__(self) -> None:
        self.num_running = 0
        self.timeouts_ms: list[int] = []

    def GetLoads(self, request: pb.GetLoadsRequest, context: grpc.ServicerContext) -> pb.GetLoadsResponse:
        return pb.GetLoadsResponse(load=load_to_proto(WorkerLoad(num_running=3, num_blocks=64)))

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainResponse:
        self.timeouts_ms.append(request.timeout_ms)
        return pb.DrainResponse(num_running=self.num_running)

    def FlushCache(self, request: pb.FlushCacheRequest, context: grpc.ServicerContext) -> pb.FlushCacheResponse:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "control of this worker is not served")


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker()


@pytest.fixture
def address(worker: FakeWorker) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(1))
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_load_is_shown_for_people_and_programs(address: str) -> None:
    shown = run("worker", "load", address)
    assert shown.exit_code == 0
    assert ["num_running", "3"] in [line.split() for line in shown.stdout.splitlines()]
    assert json.loads(run("worker", "load", address, "--json").stdout)["num_blocks"] == 64


def test_drain_says_whether_something_still_runs(worker: FakeWorker, address: str) -> None:
    assert run("worker", "drain", address, "--timeout", "2.5").stdout == "drained\n"
    worker.num_running = 2
    late = run("worker", "drain", address)
    assert late.exit_code == 1
    assert "2 requests still run" in late.stderr
    assert worker.timeouts_ms == [2500, 60_000]


def test_worker_that_takes_no_orders_is_an_error_in_its_words(address: str) -> None:
    refused = run("worker", "flush-cache", address)
    assert refused.exit_code == 1
    assert "control of this worker is not served" in refused.stderr
