"""KvHandle and TransferStats: the KV-transfer layer's values to protos and back. Used by both tiers."""

from engine.types import Epoch, Incarnation, LeaseId, WorkerId
from kv_transfer.handoff.handle import TICKET_BYTES, KvHandle, TransferStats
from kvrelay.errors import InvalidRequest
from kvrelay.v1 import handoff_pb2, session_pb2


def kv_handle_to_proto(handle: KvHandle) -> handoff_pb2.KvHandle:
    """Return the handle as the gateway relays it."""
    return handoff_pb2.KvHandle(
        lease_id=handle.lease_id,
        epoch=handle.epoch,
        ticket=handle.ticket,
        worker_id=handle.worker_id,
        incarnation=handle.incarnation,
        start_token=handle.start_token,
        num_tokens=handle.num_tokens,
        layout_fingerprint=handle.layout_fingerprint,
    )


def kv_handle_from_proto(message: handoff_pb2.KvHandle, num_tokens: int) -> KvHandle:
    """Return the handle.

    Args:
        message: As the gateway relayed it.
        num_tokens: Tokens of the request it comes with.

    Raises:
        InvalidRequest: It is not a handle for that many tokens.
    """
    if len(message.ticket) != TICKET_BYTES:
        raise InvalidRequest("kv_handle.ticket", f"must have {TICKET_BYTES} bytes")
    if message.num_tokens != num_tokens or message.start_token >= num_tokens:
        raise InvalidRequest("kv_handle.num_tokens", f"must be {num_tokens}, and start_token smaller")
    return KvHandle(
        lease_id=LeaseId(message.lease_id),
        epoch=Epoch(message.epoch),
        ticket=message.ticket,
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        start_token=message.start_token,
        num_tokens=message.num_tokens,
        layout_fingerprint=message.layout_fingerprint,
    )


def transfer_stats_to_proto(stats: TransferStats) -> session_pb2.TransferStats:
    """Return the stats as events carry them."""
    return session_pb2.TransferStats(
        num_bytes=stats.num_bytes,
        num_frames=stats.num_frames,
        total_ns=stats.total_ns,
        exposed_ns=stats.exposed_ns,
        transport=stats.transport,
    )
