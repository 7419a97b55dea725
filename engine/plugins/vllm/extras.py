"""What else than tokens a request's KV depends on: adapter, salt, images.

The names that vLLM has for them are not always enough. An adapter has a name and a path; vLLM
loads it when it is first asked for, and again when it has dropped it, from whatever then lies in
the folder. So an adapter is known by the content of its files, and only while these are the ones
that lay there before the engine started.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from pathlib import Path

import msgpack
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

log = logging.getLogger("kvstore.vllm")

CONTENT_HASH = re.compile("[0-9a-f]{64,128}")

Signature = tuple[tuple[str, int, int, int, int], ...]
"""Of each file: name, inode, size, and when it was last changed, in ns: its content, and anything
of it at all, which nobody can set back."""


def extras_of(
    request: Request,
    tokens: int,
    block_tokens: int,
    first: int = 0,
    adapter: bytes | None = None,
) -> dict[int, list[bytes]]:
    """By block, from `first` on, what else decides its KV: adapter, salt, images.

    It is vLLM's own list, and the digest of the adapter's files.
    """
    extras: dict[int, list[bytes]] = {}
    image = 0
    for block in range(first, tokens // block_tokens):
        start = block * block_tokens
        found, image = generate_block_hash_extra_keys(request, start, start + block_tokens, image)
        if found:
            extras[block] = [msgpack.packb(one) for one in found]
        if adapter is not None:
            extras.setdefault(block, []).append(adapter)
    return extras


def has_known_identity(request: Request) -> bool:
    """Whether its tokens and its images' names say what they are, in any process.

    An image's name is its content's hash, unless the client gave one, or vLLM counts images since
    both of its caches are off.
    """
    return request.prompt_embeds is None and all(
        CONTENT_HASH.fullmatch(image.identifier) for image in request.mm_features or ()
    )


class Adapters:
    """The adapters of one engine. Thread-safe."""

    def __init__(self, started_s: float | None = None):
        """`started_s` is when the engine started, since the epoch; by default, now."""
        self._started_ns = int((time.time() if started_s is None else started_s) * 1e9)
        self._seen: dict[str, Signature] = {}
        self._digests: dict[str, bytes] = {}
        self._warned: set[str] = set()

    def is_known(self, adapter: LoRARequest) -> bool:
        """Whether its files lie there unchanged since before the engine started. Some stats."""
        path = adapter.lora_path
        try:
            now = _signature(Path(path))
        except OSError:  # for one, a name on a hub
            now = ()
        known = (
            bool(now)
            and max(changed_ns for *_, changed_ns in now) < self._started_ns
            and self._seen.setdefault(path, now) == now
        )
        if not known and path not in self._warned:
            self._warned.add(path)
            log.warning(
                "adapter %s: not a folder that has lain unchanged since before the engine "
                "started, so its requests go without the store",
                adapter.lora_name,
            )
        return known

    def digest(self, adapter: LoRARequest) -> bytes:
        """SHA-256 of all its files; reads them when it is first asked. Raises OSError."""
        path = adapter.lora_path
        if path not in self._digests:
            digest = hashlib.sha256()
            for file in _files(Path(path)):
                with file.open("rb") as content:
                    digest.update(file.name.encode())
                    digest.update(hashlib.file_digest(content, "sha256").digest())
            self._digests[path] = digest.digest()
        return self._digests[path]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _signature(folder: Path) -> Signature:
    # The folder and the links as well: either may be pointed at other, older files.
    return tuple(
        (path.name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        for path in (folder, *_files(folder))
        for status in (path.lstat(), path.stat())
    )
