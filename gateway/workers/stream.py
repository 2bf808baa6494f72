"""WorkerStream: one session stream to one worker, in values. Which protos the two tiers use is known only here."""

from typing import Any

import grpc.aio

from engine.worker_types import WorkerRole
from kvrelay.v1 import decode_service_pb2, decode_service_pb2_grpc, prefill_service_pb2, prefill_service_pb2_grpc
from kvrelay.wire.engine.commands import Command, command_to_proto
from kvrelay.wire.engine.events import Event, event_from_proto

Message = decode_service_pb2.DecodeServiceSessionRequest | prefill_service_pb2.PrefillServiceSessionRequest


def encode(role: WorkerRole, command: Command, now: float) -> Message:
    """Return a command's message; deadlines become what is left of them at clock time `now`.

    Raises:
        ValueError: The tier has no such command.
    """
    if role is WorkerRole.DECODE:
        return command_to_proto(command, now, decode_service_pb2.DecodeServiceSessionRequest)
    return command_to_proto(command, now, prefill_service_pb2.PrefillServiceSessionRequest)


class WorkerStream:
    """A stream that has been started; used by one reader and one writer at a time."""

    def __init__(self, role: WorkerRole, channel: grpc.aio.Channel) -> None:
        # The generated stubs are untyped: which message a call takes is known by the role alone.
        stub: Any = (
            decode_service_pb2_grpc.DecodeServiceStub(channel)
            if role is WorkerRole.DECODE
            else prefill_service_pb2_grpc.PrefillServiceStub(channel)
        )
        self._call: grpc.aio.StreamStreamCall[Any, Any] = stub.Session()

    async def write(self, message: Message) -> None:
        """Send a command; waits while the worker does not read."""
        await self._call.write(message)

    async def read(self) -> Event | None:
        """Return the next event that this build knows; None: the worker ended the stream."""
        while True:
            message: Any = await self._call.read()
            if message is grpc.aio.EOF:
                return None
            event = event_from_proto(message)
            if event is not None:
                return event

    def cancel(self) -> None:
        """End the stream at once."""
        self._call.cancel()
