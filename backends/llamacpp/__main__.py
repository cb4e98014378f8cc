"""The child process: `python -m backends.llamacpp --socket PATH`, options as one JSON line on stdin.

stdin stays open for as long as the parent lives: its end ends this process at once, in the middle of loading too.
stdout carries state changes only, one JSON object a line. SIGTERM finishes what runs, within a short grace.
Exit codes: 0 stopped as asked, 1 broken, 2 the user must change something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson
import uvicorn
import uvloop

from backends.llamacpp.engine import Engine
from backends.llamacpp.errors import UsageProblem
from backends.llamacpp.llama_runner import LlamaRunner
from backends.llamacpp.options import Options, parse_options
from backends.llamacpp.server import Server

GRACE_S = 10  # seconds that running requests get after SIGTERM
_LAST_STEP_S = 5.0  # seconds the engine thread gets to leave llama.cpp and free the model


class _Uvicorn(uvicorn.Server):
    """uvicorn raises a caught SIGTERM again when it is done, which would spoil the exit code; signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Events:
    """The parent's view of this process: JSON lines on what was stdout."""

    def __init__(self) -> None:
        # Native code prints where it likes; file descriptor 1 leads to stderr from here on.
        self._file = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)

    def tell(self, event: str, **details: Any) -> None:
        """One line; a parent that no longer reads is no reason to fail."""
        with contextlib.suppress(OSError):
            self._file.write(orjson.dumps({"event": event, **details}) + b"\n")


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m backends.llamacpp", description=__doc__.splitlines()[0])
    parser.add_argument("--socket", required=True, help="path of the Unix socket to serve on")
    path: str = parser.parse_args().socket
    events = Events()
    try:
        options = parse_options(sys.stdin.buffer.readline())
        listener = listen(path)
    except UsageProblem as problem:
        events.tell("failed", message=str(problem))
        return 2
    threading.Thread(target=_exit_with_parent, args=(sys.stdin.buffer, path), daemon=True).start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(options, listener, events))
    finally:
        _unlink(path)


def listen(path: str) -> socket.socket:
    """A socket only this user can connect to. Raises: UsageProblem."""
    _unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    except OSError as error:
        raise UsageProblem(f"socket: cannot listen on {path}: {error}") from None
    finally:
        os.umask(before)
    listener.listen(1024)
    return listener


async def serve(options: Options, listener: socket.socket, events: Events) -> int:
    """Listen, load, serve until told to stop. Returns the exit code."""
    engine = Engine(LlamaRunner(options), max_waiting=options.max_waiting, max_wait_s=options.max_wait_s)
    server = _Uvicorn(
        uvicorn.Config(
            Server(engine, options.served_name).app,
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=600,  # the gateway's pool decides when connections close
            timeout_graceful_shutdown=GRACE_S,
        )
    )

    def stop(_: object = None) -> None:
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    engine.loaded.add_done_callback(lambda loaded: None if loaded.exception() else events.tell("ready"))
    engine.stopped.add_done_callback(stop)
    engine.start()
    await server.serve(sockets=[listener])
    engine.close()
    return await _outcome(engine, events)


async def _outcome(engine: Engine, events: Events) -> int:
    try:
        await asyncio.wait_for(asyncio.shield(engine.stopped), _LAST_STEP_S)
    except TimeoutError:
        return 0  # still inside llama.cpp; the process ends around it
    except UsageProblem as problem:
        events.tell("failed", message=str(problem))
        return 2
    except Exception as error:
        events.tell("failed", message=str(error) or type(error).__name__)
        return 1
    return 0


def _exit_with_parent(stdin: BinaryIO, path: str) -> None:
    while stdin.read(4096):
        pass
    _unlink(path)
    os._exit(0)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not sys.exit: native destructors under a running engine thread can crash
