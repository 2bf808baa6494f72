"""A session's queue: order of aborts and commands, limits, who gets which event."""

import pytest

from engine.types import RequestId
from gateway.workers.mailbox import Mailbox
from gateway.workers.messages import SessionLost
from kvrelay.errors import CapacityError, WorkerUnavailable
from kvrelay.v1 import decode_service_pb2 as decode_pb2
from kvrelay.v1 import session_pb2
from kvrelay.wire.engine.commands import PrefillLocally, Reserve
from tests.unit.gateway.builders import OfflinePool, make_request, sent


def reserve(request_id: int, attempt: int = 1) -> Reserve:
    return Reserve(make_request(request_id=request_id), attempt, deadline=None)


def test_abort_removes_what_was_not_sent_and_goes_first() -> None:
    session = OfflinePool().add("d")
    session.send(reserve(1))
    session.send(reserve(2))
    session.abort(RequestId(1))
    session.send(reserve(1, attempt=2))
    abort, second, first_again = sent(session)
    assert list(abort.request_ids) == [1]
    assert second.request.request_id == 2
    assert (first_again.request.request_id, first_again.request.attempt) == (1, 2)


def test_aborts_coalesce() -> None:
    session = OfflinePool().add("d")
    for request_id in (1, 2, 1):
        session.abort(RequestId(request_id))
    assert sent(session) == [session_pb2.AbortCommand(request_ids=[1, 2])]


def test_full_command_queue_refuses_but_takes_aborts() -> None:
    session = OfflinePool().add("d")
    for request_id in range(8):
        session.send(reserve(request_id))
    with pytest.raises(CapacityError):
        session.send(PrefillLocally(RequestId(0)))
    session.abort(RequestId(0))
    assert list(sent(session)[0].request_ids) == [0]


def test_closed_session_takes_nothing() -> None:
    session = OfflinePool().add("d")
    session.is_open = False
    with pytest.raises(WorkerUnavailable):
        session.send(reserve(1))
    with pytest.raises(WorkerUnavailable):
        session.attach(RequestId(1), Mailbox(), 10)
    session.abort(RequestId(1))
    assert sent(session) == []


async def test_lost_session_tells_every_request_and_forgets_it() -> None:
    session = OfflinePool().add("d")
    boxes = [Mailbox(), Mailbox()]
    for index, box in enumerate(boxes):
        session.attach(RequestId(index), box, 100)
    session.send(reserve(0))
    session._lose("the network is gone")
    for box in boxes:
        ((source, event),) = await box.drain()
        assert source == "d"
        assert isinstance(event, SessionLost)
    assert (session.num_requests, session.num_outstanding_tokens) == (0, 0)
    session.detach(RequestId(0))
    assert session.num_outstanding_tokens == 0
    assert sent(session) == []


def test_attached_requests_count_until_detached() -> None:
    session = OfflinePool().add("d")
    session.attach(RequestId(1), Mailbox(), 100)
    session.attach(RequestId(2), Mailbox(), 50)
    session.attach(RequestId(1), Mailbox(), 30)
    assert (session.num_requests, session.num_outstanding_tokens) == (2, 80)
    assert session.num_free_blocks < 64
    session.detach(RequestId(1))
    session.detach(RequestId(1))
    assert (session.num_requests, session.num_outstanding_tokens) == (1, 50)


def test_deadline_travels_as_the_time_that_is_left() -> None:
    pool = OfflinePool()
    session = pool.add("d")
    now = pool.clock.now()
    for deadline in (None, now + 2.5, now - 1.0):
        session.send(Reserve(make_request(), 1, deadline))
    commands: list[decode_pb2.ReserveCommand] = sent(session)
    assert [command.request.timeout_ms for command in commands] == [0, 2500, 1]
