"""Generated protobuf and gRPC stubs of package kvrelay.v1; regenerate with `make protos`."""
