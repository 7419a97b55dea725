"""Chunks written and read by hand are protobuf's, to the byte; the allocator is set once."""

import subprocess
import sys

import pytest

from kvstore.wire import chunks
from kvstore.wire._pb import kvstore_pb2 as pb

SIZES = [0, 1, 127, 128, 16_383, 16_384, 1 << 20, (2 << 20) + 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_packed_chunk_is_the_message_that_protobuf_writes(size: int):
    chunk = bytes(range(256)) * (size // 256) + bytes(range(size % 256))
    packed = chunks.pack(memoryview(chunk))
    assert type(packed) is bytes  # gRPC hangs on a bytearray
    if size:
        assert packed == pb.PutRequest(chunk=chunk).SerializeToString()
        assert packed == pb.GetResponse(chunk=chunk).SerializeToString()
    assert pb.PutRequest.FromString(packed).chunk == chunk
    view = chunks.unpack(packed)
    assert view is not None
    assert bytes(view) == chunk


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x12",
        b"\x12\x05abc",
        b"\x12\x03abcd",
        b"\x12\x03abc\x12\x03def",
        b"\x12\x80\x80\x80\x80\x80\x80\x01",
        pb.PutRequest(checksum=7).SerializeToString(),
        pb.GetResponse(result=pb.GetResult(index=3, checksum=9)).SerializeToString(),
    ],
)
def test_what_is_not_exactly_one_chunk_is_left_to_protobuf(message: bytes):
    assert chunks.unpack(message) is None


ALLOCATOR = """
from kvstore.allocator import keep_large_buffers
print(keep_large_buffers(), keep_large_buffers())
"""


@pytest.mark.parametrize(
    ("environment", "said"), [({}, "True True"), ({"MALLOC_TOP_PAD_": "131072"}, "False False")]
)
def test_the_allocator_is_left_alone_when_the_environment_has_set_it(
    environment: dict[str, str], said: str
):
    done = subprocess.run(
        [sys.executable, "-c", ALLOCATOR], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == said, done.stderr


def test_importing_the_client_changes_no_allocator():
    code = (
        "import kvstore.client\n"
        "from kvstore.allocator import keep_large_buffers\n"
        "print(keep_large_buffers.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr
