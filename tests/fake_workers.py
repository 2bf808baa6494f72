"""Fake prefill and decode workers with scripted tokens and failures, for tests of the gateway.

What they hold and what they were told is public, for tests to look at. Both tiers of one test share a `FakeCluster`,
over which prefill "sends KV". What both share is in `fake_worker_base.py`.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from kvrelay.errors import EngineError, LeaseUnknown
from kvrelay.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    handoff_pb2,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    registry_service_pb2,
    sampling_pb2,
    session_pb2,
)
from tests.fake_worker_base import FakeCluster, FakeSession, FakeWorker, Script, open_gate, request_error

__all__ = ["FakeCluster", "FakeDecodeWorker", "FakePrefillWorker", "Script"]

_TICKET = b"0123456789abcdef"


@dataclass
class _Lease:
    request: session_pb2.EngineRequest
    session: FakeSession
    epoch: int


class FakeDecodeWorker(FakeWorker, decode_service_pb2_grpc.DecodeServiceServicer):
    """Grants, commits and generates as scripted."""

    role = registry_service_pb2.WORKER_ROLE_DECODE

    def __init__(self, worker_id: str, cluster: FakeCluster, incarnation: int = 1) -> None:
        super().__init__(worker_id, cluster, incarnation)
        cluster.decode[worker_id] = self
        self.leases: dict[int, _Lease] = {}
        """Request id -> its open reservation."""
        self.may_reserve = open_gate()
        self.may_generate = open_gate()
        self.num_cached_tokens = 0
        self.reserve_error: EngineError | None = None
        self.dies_before_index: int | None = None
        """Ends its sessions instead of sending the token with this index, once."""
        self.sends_duplicates = False
        self.commits: list[int] = []
        self.renewed: list[int] = []
        """Request ids of all renewals received."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add DecodeService."""
        decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        """Serve one gateway."""
        try:
            await self.serve(request_iterator, context, decode_service_pb2.DecodeServiceSessionResponse)
        finally:
            self.leases = {rid: lease for rid, lease in self.leases.items() if lease.session in self.sessions}

    def take(self, kind: str, command: Any, session: FakeSession) -> None:
        """Act on reserve, supersede, prefill_locally and renew."""
        if kind == "renew":
            self.renewed.extend(command.request_ids)
            return
        if kind == "reserve":
            self.start_work(command.request.request_id, self._reserve(command.request, session), session)
            return
        lease = self.leases.get(command.request_id)
        if lease is None:
            attempt = command.attempt if kind == "supersede" else 0
            error = request_error(command.request_id, attempt, LeaseUnknown("no reservation"))
            session.events.put_nowait(decode_service_pb2.DecodeServiceSessionResponse(error=error))
        elif kind == "supersede":
            lease.request.attempt, lease.epoch = command.attempt, lease.epoch + 1
            self._grant(lease)
        else:
            del self.leases[command.request_id]
            self._generate(lease, len(lease.request.token_ids) - lease.request.num_prompt_tokens)

    def forget(self, request_id: int) -> None:
        """Free what is held for a request."""
        super().forget(request_id)
        self.leases.pop(request_id, None)

    def commit(self, handle: handoff_pb2.KvHandle) -> bool:
        """Take over a request from prefill; False: the lease is gone or a newer epoch owns it."""
        lease = self.leases.get(handle.lease_id)
        if lease is None or lease.epoch != handle.epoch or handle.ticket != _TICKET:
            return False
        del self.leases[handle.lease_id]
        self.commits.append(handle.lease_id)
        transfer = session_pb2.TransferStats(num_bytes=4096, num_frames=2, total_ns=3_000, transport="inproc")
        lease.session.events.put_nowait(
            decode_service_pb2.DecodeServiceSessionResponse(
                committed=decode_service_pb2.CommittedEvent(
                    request_id=lease.request.request_id, attempt=lease.request.attempt, transfer=transfer
                )
            )
        )
        first_index = len(lease.request.token_ids) - lease.request.num_prompt_tokens
        self._generate(lease, first_index + 1)
        return True

    async def _reserve(self, request: session_pb2.EngineRequest, session: FakeSession) -> None:
        await self.may_reserve.wait()
        if self.reserve_error is not None:
            error = request_error(request.request_id, request.attempt, self.reserve_error)
            session.events.put_nowait(decode_service_pb2.DecodeServiceSessionResponse(error=error))
            return
        lease = _Lease(request, session, epoch=1)
        self.leases[request.request_id] = lease
        self._grant(lease)

    def _grant(self, lease: _Lease) -> None:
        request = lease.request
        handle = handoff_pb2.KvHandle(
            lease_id=request.request_id,
            epoch=lease.epoch,
            ticket=_TICKET,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            start_token=self.num_cached_tokens,
            num_tokens=len(request.token_ids),
            layout_fingerprint=self.layout.fingerprint,
        )
        lease.session.events.put_nowait(
            decode_service_pb2.DecodeServiceSessionResponse(
                reserved=decode_service_pb2.ReservedEvent(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    kv_handle=handle,
                    num_cached_tokens=self.num_cached_tokens,
                )
            )
        )

    def _generate(self, lease: _Lease, start: int) -> None:
        self.start_work(
            lease.request.request_id, self._send_outputs(lease.request, start, lease.session), lease.session
        )

    async def _send_outputs(self, request: session_pb2.EngineRequest, start: int, session: FakeSession) -> None:
        script = self.cluster.script
        is_local = start == len(request.token_ids) - request.num_prompt_tokens
        num_tokens = min(len(script.tokens(request)), request.sampling_params.max_tokens)
        for index in itertools.count(start, script.tokens_per_output):
            await self.may_generate.wait()
            if index >= num_tokens > 0:
                return
            if self.dies_before_index is not None and index >= self.dies_before_index:
                self.dies_before_index = None
                self.break_sessions()
                return
            output = script.output(request, index, script.tokens_per_output)
            if is_local and index == start:
                output.prefill_timing.queue_ns, output.prefill_timing.prefill_ns = 1_000, 2_000
            step = session_pb2.StepOutput(outputs=[output])
            for _ in range(2 if self.sends_duplicates else 1):
                session.events.put_nowait(decode_service_pb2.DecodeServiceSessionResponse(step=step))
            if num_tokens == 0:
                return
            await asyncio.sleep(script.pace_s)


class FakePrefillWorker(FakeWorker, prefill_service_pb2_grpc.PrefillServiceServicer):
    """Samples first tokens and commits to the cluster's decode workers as scripted."""

    role = registry_service_pb2.WORKER_ROLE_PREFILL

    def __init__(self, worker_id: str, cluster: FakeCluster, incarnation: int = 1) -> None:
        super().__init__(worker_id, cluster, incarnation)
        self.may_prefill = open_gate()
        self.may_send_first_token = open_gate()
        self.error: EngineError | None = None
        """Ends every request with this."""
        self.dies_on_prefill = False
        """Ends its sessions at the next Prefill, once."""
        self.dies_before_first_token = False
        """Ends its sessions after the commit, before the first token was sent, once."""
        self.peers: list[str] = []
        """Decode workers as last announced."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Add PrefillService."""
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> None:
        """Serve one gateway."""
        await self.serve(request_iterator, context, prefill_service_pb2.PrefillServiceSessionResponse)

    def take(self, kind: str, command: Any, session: FakeSession) -> None:
        """Act on update_peers and prefill."""
        if kind == "update_peers":
            self.peers = [peer.worker_id for peer in command.peers]
        elif self.dies_on_prefill:
            self.dies_on_prefill = False
            self.break_sessions()
        else:
            self.start_work(command.request.request_id, self._prefill(command, session), session)

    async def _prefill(self, command: prefill_service_pb2.PrefillCommand, session: FakeSession) -> None:
        request, handle = command.request, command.kv_handle
        response = prefill_service_pb2.PrefillServiceSessionResponse
        await self.may_prefill.wait()
        if self.error is not None or handle.worker_id not in self.peers:
            error = self.error or EngineError(f"decode worker {handle.worker_id} was not announced")
            session.events.put_nowait(response(error=request_error(request.request_id, request.attempt, error)))
            return
        first_index = len(request.token_ids) - request.num_prompt_tokens
        output = self.cluster.script.output(request, first_index, 1)
        output.prefill_timing.queue_ns, output.prefill_timing.prefill_ns = 1_000, 2_000
        first_token = response(step=session_pb2.StepOutput(outputs=[output]))
        is_held = not self.may_send_first_token.is_set() or self.dies_before_first_token
        if not is_held:
            session.events.put_nowait(first_token)
        has_more = output.finish_reason == sampling_pb2.FINISH_REASON_UNSPECIFIED
        decode = self.cluster.decode.get(handle.worker_id)
        if has_more and decode is not None and decode.commit(handle):
            transfer = session_pb2.TransferStats(num_bytes=4096, num_frames=2, total_ns=3_000, exposed_ns=700)
            exported = prefill_service_pb2.ExportedEvent(
                request_id=request.request_id, attempt=request.attempt, transfer=transfer
            )
            session.events.put_nowait(response(exported=exported))
        if self.dies_before_first_token:
            self.dies_before_first_token = False
            self.break_sessions()
        elif is_held:
            await self.may_send_first_token.wait()
            session.events.put_nowait(first_token)
