"""What workers tell of themselves: WorkerInfo, ModelInfo, WorkerLoad and TransferPeer, to protos and back."""

from dataclasses import dataclass, fields
from typing import Self

from engine.cache.layout import KvLayout
from engine.types import Incarnation, WorkerId
from engine.worker_types import TransferPeer, WorkerInfo, WorkerLoad, WorkerRole
from kvrelay.errors import InvalidRequest
from kvrelay.v1 import prefill_service_pb2, session_pb2, worker_service_pb2
from kvrelay.v1 import registry_service_pb2 as registry_pb2
from kvrelay.wire.engine.layout import layout_from_proto, layout_to_proto

_ROLE_TO_PROTO = {
    WorkerRole.PREFILL: registry_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: registry_pb2.WORKER_ROLE_DECODE,
}
_ROLE_FROM_PROTO = {proto: role for role, proto in _ROLE_TO_PROTO.items()}
_LOAD_FIELDS = tuple(each.name for each in fields(WorkerLoad))


def worker_info_to_proto(info: WorkerInfo) -> registry_pb2.RegisterRequest:
    """Return a worker's registration."""
    return registry_pb2.RegisterRequest(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=_ROLE_TO_PROTO[info.role],
        address=info.address,
        model_name=info.model_name,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        layout=layout_to_proto(info.layout),
        num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs,
        transfer_addresses=info.transfer_addresses,
        transports=info.transports,
        kernels=info.kernels,
    )


def worker_info_from_proto(message: registry_pb2.RegisterRequest) -> WorkerInfo:
    """Return what a worker says of itself.

    Raises:
        InvalidRequest: The role or the layout is missing.
        LayoutMismatch: The layout is not one this build knows.
    """
    role = _ROLE_FROM_PROTO.get(message.role)
    if role is None:
        raise InvalidRequest("role", "must be WORKER_ROLE_PREFILL or WORKER_ROLE_DECODE")
    if not message.HasField("layout"):
        raise InvalidRequest("layout", "is missing")
    return WorkerInfo(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        role=role,
        address=message.address,
        model_name=message.model_name,
        architecture=message.architecture,
        vocab_size=message.vocab_size,
        context_length=message.context_length,
        layout=layout_from_proto(message.layout),
        num_blocks=message.num_blocks,
        max_num_seqs=message.max_num_seqs,
        transfer_addresses=tuple(message.transfer_addresses),
        transports=tuple(message.transports),
        kernels=message.kernels,
    )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A worker's model and cache, for whoever asks the worker itself."""

    model_name: str
    architecture: str
    context_length: int
    vocab_size: int
    layout: KvLayout
    num_blocks: int
    device: str
    """What it computes on, e.g. `cpu` or `cuda:0`."""
    kernels: str

    @classmethod
    def of(cls, info: WorkerInfo, device: str) -> Self:
        """Return what a worker that registers as `info` answers."""
        return cls(
            info.model_name,
            info.architecture,
            info.context_length,
            info.vocab_size,
            info.layout,
            info.num_blocks,
            device,
            info.kernels,
        )


def model_info_to_proto(info: ModelInfo) -> worker_service_pb2.GetModelInfoResponse:
    """Return a worker's answer to GetModelInfo."""
    return worker_service_pb2.GetModelInfoResponse(
        model_name=info.model_name,
        architecture=info.architecture,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        layout=layout_to_proto(info.layout),
        num_blocks=info.num_blocks,
        device=info.device,
        kernels=info.kernels,
    )


def model_info_from_proto(message: worker_service_pb2.GetModelInfoResponse) -> ModelInfo:
    """Return what a worker answered.

    Raises:
        LayoutMismatch: Its layout is not one this build knows.
    """
    return ModelInfo(
        model_name=message.model_name,
        architecture=message.architecture,
        context_length=message.context_length,
        vocab_size=message.vocab_size,
        layout=layout_from_proto(message.layout),
        num_blocks=message.num_blocks,
        device=message.device,
        kernels=message.kernels,
    )


def load_to_proto(load: WorkerLoad) -> session_pb2.WorkerLoad:
    """Return a load; both sides name its fields alike."""
    return session_pb2.WorkerLoad(**{name: getattr(load, name) for name in _LOAD_FIELDS})


def load_from_proto(message: session_pb2.WorkerLoad) -> WorkerLoad:
    """Return a load."""
    return WorkerLoad(**{name: getattr(message, name) for name in _LOAD_FIELDS})


def peer_to_proto(peer: TransferPeer) -> prefill_service_pb2.TransferPeer:
    """Return a decode worker as prefill workers are told of it."""
    return prefill_service_pb2.TransferPeer(
        worker_id=peer.worker_id,
        incarnation=peer.incarnation,
        addresses=peer.addresses,
        layout=layout_to_proto(peer.layout),
    )


def peer_from_proto(message: prefill_service_pb2.TransferPeer) -> TransferPeer:
    """Return a decode worker that KV may be sent to.

    Raises:
        LayoutMismatch: Its layout is not one this build knows.
    """
    return TransferPeer(
        worker_id=WorkerId(message.worker_id),
        incarnation=Incarnation(message.incarnation),
        addresses=tuple(message.addresses),
        layout=layout_from_proto(message.layout),
    )
