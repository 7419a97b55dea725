"""Many client processes at once: how many calls a second the server answers, beside a bare one.

The bare server has the same session stream and answers every call with nothing, in a process of
its own: what gRPC in Python can do here. All clients make the calls of one kind at a time, as fast
as they get answers, for the same span.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe
from typing import Any

import grpc

from kvstore.client.connection import CALL_TIMEOUT_S, Connection
from kvstore.types import BlockKey, NamespaceInfo
from kvstore.wire._pb import kvstore_pb2 as pb
from scripts.bench import common

START_TIMEOUT_S = 120.0
KINDS = ("bare", "empty", "lookup")
"""Empty calls to the bare server, empty calls to kvstore's, lookups of one prefix there."""


async def _answer_nothing(requests: AsyncIterator[pb.SessionRequest], context: Any) -> None:
    async for request in requests:
        answer = pb.SessionResponse(id=request.id, release=pb.ReleaseResponse())
        if request.WhichOneof("call") == "attach":
            answer = pb.SessionResponse(id=request.id, attach=pb.AttachResponse(session=1))
        await context.write(answer)


def _serve_bare(target: str, parent: Pipe) -> None:
    handler = grpc.stream_stream_rpc_method_handler(
        _answer_nothing, pb.SessionRequest.FromString, pb.SessionResponse.SerializeToString
    )

    async def serve() -> None:
        server = grpc.aio.server()
        service = pb.DESCRIPTOR.services_by_name["KVStore"].full_name
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Session": handler}),)
        )
        server.add_insecure_port(target)
        await server.start()
        parent.send(True)
        with contextlib.suppress(EOFError):  # the parent has closed its end
            await asyncio.to_thread(parent.recv)
        await server.stop(None)

    asyncio.run(serve())


def _call(
    target: str, bare: str, info: NamespaceInfo, keys: Sequence[BlockKey], parent: Pipe
) -> None:
    """A client process: makes the calls that its parent asks for, and says how many it made."""
    with (
        contextlib.closing(Connection(target, False, lambda: None)) as connection,
        contextlib.closing(Connection(bare, False, lambda: None)) as rival,
    ):
        assert connection.wait_attached(START_TIMEOUT_S)
        assert rival.wait_attached(START_TIMEOUT_S)
        assert connection.attached is not None
        assert rival.attached is not None
        ours, bares = connection.attached.calls, rival.attached.calls
        look = pb.LookupRequest(namespace=info.fingerprint, keys=b"".join(keys))
        calls: dict[str, Callable[[], Any]] = {
            "bare": lambda: bares.release(pb.ReleaseRequest(), CALL_TIMEOUT_S),
            "empty": lambda: ours.release(pb.ReleaseRequest(), CALL_TIMEOUT_S),
            "lookup": lambda: ours.lookup(look, CALL_TIMEOUT_S),
        }
        parent.send(True)
        with contextlib.suppress(EOFError):  # the parent has closed its end
            while True:
                kind, span_s = parent.recv()
                call, made, end_s = calls[kind], 0, time.perf_counter() + span_s
                while time.perf_counter() < end_s:
                    call()
                    made += 1
                parent.send(made)


@contextmanager
def _processes(jobs: Sequence[tuple[Any, ...]]) -> Iterator[list[Pipe]]:
    """Processes of `(function, *arguments)`, and a pipe to each; they end when these close."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for function, *arguments in jobs:
            pipe, child = context.Pipe()
            process = context.Process(target=function, args=(*arguments, child), daemon=True)
            process.start()
            child.close()
            pipes.append(pipe)
            processes.append(process)
        for pipe in pipes:
            if not pipe.poll(START_TIMEOUT_S):
                raise TimeoutError("a process of the benchmark did not start")
            pipe.recv()
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5.0)
            process.kill()


def measure(
    target: str,
    folder: str,
    info: NamespaceInfo,
    keys: Sequence[BlockKey],
    *,
    clients: int,
    rounds: int,
    span_s: float,
) -> dict[str, float]:
    """Calls a second by kind, and `empty_over_bare`; medians over the rounds.

    The server at `target` has the keys; `folder` is for the bare server's socket.
    """
    bare = f"unix:{folder}/bare.sock"
    with (
        _processes([(_serve_bare, bare)]),
        _processes([(_call, target, bare, info, keys)] * clients) as pipes,
        common.progress("clients", rounds * len(KINDS)) as advance,
    ):

        def case(kind: str) -> Callable[[], float]:
            def run() -> float:
                for pipe in pipes:
                    pipe.send((kind, span_s))
                return float(sum(pipe.recv() for pipe in pipes)) / span_s

            return run

        rates = common.interleaved({kind: case(kind) for kind in KINDS}, rounds, advance)
    return {
        **{f"{kind}_per_s": statistics.median(values) for kind, values in rates.items()},
        "empty_over_bare": common.median_ratio(rates["empty"], rates["bare"]),
    }
