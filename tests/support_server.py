"""A small OpenAI-compatible server in a thread: tests say what it answers and see what it was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = str | tuple[int, str] | None
"""What the model says; or a status with a body; or None: hang up without a word."""


@dataclass
class Server:
    """`requests` and `headers` are what it was asked, in the order of arrival; `most_at_once` the most under way."""

    reply: Callable[[dict], Reply]
    url: str = ""
    requests: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_once: int = 0
    most_at_once: int = 0

    def never(self, request: dict) -> Reply:
        """A reply that does not come while the test runs."""
        self.closing.wait()
        return None


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: Server = self.server.shared
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(request)
            server.headers.append(dict(self.headers))
            server.paths.append(self.path)
            server.at_once += 1
            server.most_at_once = max(server.most_at_once, server.at_once)
        try:
            reply = server.reply(request)
        finally:
            with server.lock:
                server.at_once -= 1
        if reply is None:
            return
        if isinstance(reply, str):
            reply = 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": reply}}]})
        status, body = reply
        self.send_response(status)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


class _HTTPServer(ThreadingHTTPServer):
    request_queue_size = 64
    shared: Server

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that left early are what some tests are about."""


@contextmanager
def serve(reply: Callable[[dict], Reply] | Reply) -> Iterator[Server]:
    """A server on a free port of this machine; `reply` may be a fixed one."""
    shared = Server(reply if callable(reply) else lambda _: reply)
    http = _HTTPServer(("127.0.0.1", 0), _Handler)
    http.shared, shared.url = shared, f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield shared
    finally:
        shared.closing.set()
        http.shutdown()
        thread.join()
        http.server_close()


def replies(*texts: Reply) -> Callable[[dict], Reply]:
    """The given replies in their order; the last one again and again."""
    left, lock = list(texts), threading.Lock()

    def reply(_: dict) -> Reply:
        with lock:
            return left.pop(0) if len(left) > 1 else left[0]

    return reply


def closed_url() -> str:
    """An address at which nobody listens."""
    with serve("") as server:
        return server.url
