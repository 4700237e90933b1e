"""A real S3 server of this process (moto's), a way to it that breaks, and a server of HTTP."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """The port of a server on loopback, which keeps objects in memory."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        yield server.get_host_and_port()[1]
    finally:
        server.stop()


@contextlib.contextmanager
def bucket(set_environment: Callable[[str, str], None]) -> Iterator[BreakingWay]:
    """A way to a server with a bucket `bucket`, which s3fs finds by variables of the environment."""
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        set_environment(name, "testing")
    set_environment("AWS_DEFAULT_REGION", "us-east-1")
    with s3_server() as port:
        way = BreakingWay(port, num_cuts=0, after_bytes=2_000)
        set_environment("AWS_ENDPOINT_URL", f"http://127.0.0.1:{way.port}")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().makedirs("bucket", exist_ok=True)
        yield way
        s3fs.S3FileSystem.clear_instance_cache()
        way.close()


@contextlib.contextmanager
def http_server(files: Mapping[str, bytes], *, ranges: bool = True, delay_s: float = 0.0) -> Iterator[tuple[int, list]]:
    """The port of a server of HTTP that has these files, and the list of what it was asked to give: a name, and the
    first and last byte or None. It answers after `delay_s`; without `ranges` it gives a whole file whatever it is
    asked for."""
    asked: list[tuple[str, tuple[int, int] | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(gives=True)

        def do_HEAD(self) -> None:
            self._answer(gives=False)

        def _answer(self, *, gives: bool) -> None:
            content = files.get(name := self.path.strip("/"))
            if content is None:
                self.send_error(404)
                return
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if ranges else None
            first, last = (int(wanted[1]), min(int(wanted[2]), len(content) - 1)) if wanted else (0, len(content) - 1)
            if gives:
                asked.append((name, (first, last) if wanted else None))
                time.sleep(delay_s)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(last + 1 - first))
            if wanted:
                self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            self.send_header("ETag", f'"{zlib.crc32(content)}"')
            self.send_header("Accept-Ranges", "bytes" if ranges else "none")
            self.end_headers()
            if gives:
                self.wfile.write(content[first : last + 1])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server.server_port, asked
        server.shutdown()
        thread.join()


class BreakingWay:
    """Passes connections on to a port of this machine. The next `num_cuts` of those that carry more than `after_bytes`
    are cut there; `cuts` counts them."""

    def __init__(self, port: int, *, num_cuts: int, after_bytes: int):
        self.num_cuts, self.after_bytes, self.cuts = num_cuts, after_bytes, 0
        self._target, self._lock = port, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    def close(self) -> None:
        """It takes no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                ours, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(ours,), daemon=True).start()

    def _join(self, ours: socket.socket) -> None:
        with ours, socket.create_connection(("127.0.0.1", self._target)) as theirs:
            back = threading.Thread(target=self._pass_on, args=(theirs, ours), daemon=True)
            back.start()
            self._pass_on(ours, theirs)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while content := source.recv(4096):
                passed += len(content)
                if passed > self.after_bytes and self._may_cut():
                    break
                target.sendall(content)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _may_cut(self) -> bool:
        with self._lock:
            if self.cuts == self.num_cuts:
                return False
            self.cuts += 1
            return True
