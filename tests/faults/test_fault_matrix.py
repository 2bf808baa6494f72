"""Every fault at every moment of a hand-off over every transport, between real services.

What the gateway does after a retryable error is played here: another attempt in the same reservation, then prefill on
the decode worker. Whatever strikes, the request ends with exactly the tokens of the fault-free run, in time, and leaves
no block, lease, descriptor or task behind.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from engine.types import EngineRequest, SequenceOutput
from kv_transfer.frame import FrameKind
from kv_transfer.handoff.import_table import ImportTable
from kv_transfer.transports.registry import TransportRegistry
from kvrelay.errors import EngineError
from kvrelay.v1 import decode_service_pb2 as pb
from tests.engine_driver import make_engine, make_request, run_alone
from tests.fakes_faults import FaultScript, FaultyTransport, Strike
from tests.fakes_transport import Fault
from tests.leaks import Snapshot
from tests.tiny_models import write_tiny_model
from tests.transports import TRANSPORTS
from tests.worker_harness import Driver, HarnessWorker, run_decode, run_prefill, settle

pytestmark = [pytest.mark.asyncio(loop_scope="module")]

DEADLINE_S = 15.0
ANSWER_TIMEOUT_S = 0.3
COMMIT_TIMEOUT_S = 0.6
MAX_ATTEMPTS = 3
PATIENCE_S = 3.0
PAYLOAD_BYTES = 4096
"""One block of the tiny model's layer: a 40-token prompt takes nine frames."""
PROMPT = list(range(5, 45))

_GRPC_TASK = "_cython_"

MOMENTS = {
    "greeting": (FrameKind.HELLO, 0),
    "answer to the greeting": (FrameKind.HELLO, 1),
    "open": (FrameKind.OPEN, 0),
    "accepted": (FrameKind.ACCEPTED, 0),
    "first layer": (FrameKind.KV, 0),
    "mid layers": (FrameKind.KV, 4),
    "last layer": (FrameKind.KV, 8),
    "commit": (FrameKind.COMMIT, 0),
    "committed": (FrameKind.COMMITTED, 0),
}
"""Frames of a hand-off by where it stands when they pass."""
ALWAYS = {
    ("mid layers", Fault.BIT_FLIP),
    ("mid layers", Fault.STALL),
    ("last layer", Fault.DROP),
    ("commit", Fault.CUT),
    ("committed", Fault.DROP),
}
"""What runs in every test run over the transports between processes; the rest of theirs is soak."""


@dataclass
class FaultyPair:
    """A prefill and a decode worker, and what will happen between them."""

    decode: HarnessWorker
    prefill: HarnessWorker
    driver: Driver
    script: FaultScript
    request_ids: int = 0

    def request(self, number: int) -> EngineRequest:
        """Return one of two prompts under a new id."""
        self.request_ids += 1
        return _request(self.request_ids, number)

    async def is_idle(self) -> bool:
        """Whether pools are whole and no lease, sequence, job or link is left."""
        return await self.decode.is_idle() and await self.prefill.is_idle()


def _request(request_id: int, number: int) -> EngineRequest:
    prompt = [token + number for token in PROMPT]
    return make_request(request_id, prompt, max_tokens=8, ignore_eos=True, temperature=0.7, seed=number)


@pytest.fixture(scope="module", name="model")
def fixture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("faults") / "llama", "llama")


@pytest.fixture(scope="module", name="expected")
def fixture_expected(model: Path) -> list[list[int]]:
    tokens = run_alone(make_engine(model), [_request(1, 0), _request(2, 1)])
    return [tokens[1], tokens[2]]


@asynccontextmanager
async def _run_pair(model: Path, transport: str) -> AsyncIterator[FaultyPair]:
    script = FaultScript()
    make_transport = TRANSPORTS[transport]
    connecting = TransportRegistry([FaultyTransport(make_transport(), script, PAYLOAD_BYTES)])
    async with (
        run_decode(
            partial(make_engine, model, prefix_cache=False), transports=TransportRegistry([make_transport()])
        ) as decode,
        run_prefill(
            lambda listener: make_engine(model, prefix_cache=False, listener=listener),
            transports=connecting,
            commit_timeout_s=COMMIT_TIMEOUT_S,
            answer_timeout_s=ANSWER_TIMEOUT_S,
        ) as prefill,
    ):
        driver = Driver()
        await driver.connect(decode, prefill)
        try:
            yield FaultyPair(decode, prefill, driver, script)
        finally:
            await driver.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="pair")
async def fixture_pair(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[FaultyPair]:
    async with _run_pair(model, request.param) as pair:
        yield pair


async def _serve(pair: FaultyPair, request: EngineRequest) -> list[int]:
    """Serve a request as a gateway would, retrying what may be retried; returns its tokens."""
    driver = pair.driver
    attempt, is_committed = 1, False
    tokens: dict[int, int] = {}
    end: int | None = None
    await driver.send_prefill(request, await driver.reserve(request), attempt)
    while end is None or len(tokens) < end:
        try:
            event = await driver.next(request, object, attempt)
        except EngineError as error:
            if is_committed:
                continue  # decode has it: what the prefill worker makes of the acknowledgement is of no interest
            if not error.is_retryable or attempt == MAX_ATTEMPTS:
                raise
            attempt += 1
            await driver.supersede(request, attempt)
            continue
        match event:
            case pb.ReservedEvent() if attempt < MAX_ATTEMPTS:
                await driver.send_prefill(request, event, attempt)
            case pb.ReservedEvent():
                await driver.prefill_locally(request)
            case pb.CommittedEvent():
                is_committed = True
            case SequenceOutput():
                for index, token in enumerate(event.token_ids, event.token_index):
                    assert tokens.setdefault(index, token) == token  # another attempt says the same
                if event.finish_reason is not None:
                    end = event.token_index + len(event.token_ids)
            case _:
                pass
    return [tokens[index] for index in sorted(tokens)]


async def _strike(pair: FaultyPair, strike: Strike, expected: list[list[int]]) -> list[list[int]]:
    """Serve two requests, one of which meets the fault; returns their tokens and checks what is left behind."""
    await pair.driver.announce([])  # the links of an earlier test go
    await settle(pair.is_idle)
    await asyncio.sleep(0.05)
    before, num_grpc_tasks = Snapshot.take(), _num_grpc_tasks()
    pair.script.arm(strike)
    await pair.driver.announce([pair.decode])
    async with asyncio.timeout(DEADLINE_S):
        tokens = await asyncio.gather(*(_serve(pair, pair.request(number)) for number in range(len(expected))))
    assert pair.script.has_struck
    pair.script.arm(None)
    await settle(pair.is_idle)
    await pair.driver.announce([])
    leaks = await _settle_leaks(before, num_grpc_tasks)
    assert not leaks, leaks
    return list(tokens)


async def _settle_leaks(before: Snapshot, num_grpc_tasks: int) -> list[str]:
    """Wait until nothing new is left, or return what is."""
    give_up_at = time.monotonic() + PATIENCE_S
    while True:
        # gRPC's own task that waits for the next call is another one after each call: only their number counts.
        leaks = [leak for leak in before.new_in(Snapshot.take()) if _GRPC_TASK not in leak]
        if _num_grpc_tasks() > num_grpc_tasks:
            leaks.append("a call of gRPC")
        if not leaks or time.monotonic() > give_up_at:
            return leaks
        await asyncio.sleep(0.05)


def _num_grpc_tasks() -> int:
    return sum(_GRPC_TASK in str(task.get_coro()) for task in asyncio.all_tasks())


def _cells() -> list[object]:
    cells: list[object] = []
    for transport in TRANSPORTS:
        for moment in MOMENTS:
            for fault in Fault:
                is_always = transport == "inproc" or (moment, fault) in ALWAYS
                marks = () if is_always else (pytest.mark.soak,)
                cells.append(
                    pytest.param(
                        transport, moment, fault, marks=marks, id=f"{transport}-{moment.replace(' ', '_')}-{fault}"
                    )
                )
    return cells


@pytest.mark.parametrize(("pair", "moment", "fault"), _cells(), indirect=["pair"])
async def test_whatever_strikes_the_tokens_are_those_of_the_fault_free_run(
    pair: FaultyPair, expected: list[list[int]], moment: str, fault: Fault
) -> None:
    kind, number = MOMENTS[moment]
    assert await _strike(pair, Strike(kind, fault, number), expected) == expected


@pytest.mark.parametrize("pair", ["inproc"], indirect=True)
@pytest.mark.parametrize("moment", ["first layer", "mid layers", "last layer"])
async def test_without_digests_flipped_bits_reach_the_tokens(
    pair: FaultyPair, expected: list[list[int]], moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the test above can fail."""
    intact: Callable[[ImportTable, object], bool] = lambda table, frame: True  # noqa: E731
    monkeypatch.setattr(ImportTable, "_is_intact", intact)
    kind, number = MOMENTS[moment]
    tokens = await _strike(pair, Strike(kind, Fault.BIT_FLIP, number, is_burst=True), expected)
    assert tokens != expected
