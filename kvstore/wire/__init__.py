"""Between protobuf messages and kvstore's types. `_pb` is generated; see scripts/gen_protos."""
