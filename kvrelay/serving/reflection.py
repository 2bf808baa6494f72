"""Reflection, under both names that clients ask for: `grpc.reflection.v1`, and `v1alpha` for those that fall back.

Owns what makes the two one: their messages are the same bytes, but the library ships only the older. Which services may
be asked about is said by `kvrelay/serving/server.py`.
"""

from collections.abc import Iterable
from typing import Final

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from grpc_reflection.v1alpha import reflection, reflection_pb2

_OLD_PACKAGE: Final = "grpc.reflection.v1alpha"
_PACKAGE: Final = "grpc.reflection.v1"
_FILE: Final = "grpc/reflection/v1/reflection.proto"
SERVICE_NAME: Final = f"{_PACKAGE}.ServerReflection"


def add_reflection(server: grpc.aio.Server, service_names: Iterable[str]) -> None:
    """Let clients such as grpcurl ask for the named services; health and reflection itself are always included.

    Args:
        server: A server that has not been started.
        service_names: Full names, e.g. `kvrelay.v1.InferenceService`; their stubs must have been imported.
    """
    _describe_service()
    versions = (reflection.SERVICE_NAME, SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer((*service_names, HEALTH_SERVICE_NAME, *versions))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": method}
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(version, methods) for version in versions)
    )


def _describe_service() -> None:
    """Make the newer service's own description known, so that whoever lists it can also ask what it is."""
    pool = descriptor_pool.Default()
    try:
        pool.FindFileByName(_FILE)
    except KeyError:
        description = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(description)
        pool.Add(_renamed(description))


def _renamed(description: FileDescriptorProto) -> FileDescriptorProto:
    description.name, description.package = _FILE, _PACKAGE
    old, new = f".{_OLD_PACKAGE}.", f".{_PACKAGE}."
    for message in description.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(old, new)
    for service in description.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new)
            method.output_type = method.output_type.replace(old, new)
    return description
