"""Bounds of the wire, the same on both sides."""

MESSAGE_BYTES_MAX = 8 << 20
KEYS_MAX = 65_536
CHUNK_BYTES = 1 << 20
"""Payload bytes a streamed message carries."""
NAME_CHARS_MAX = 512

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
)
COSTS_CHARS_MAX = 1 << 16
POSITION_MAX = 1 << 24
"""Of a block in its prefix."""
