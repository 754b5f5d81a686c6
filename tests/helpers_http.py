"""An endpoint that speaks OpenAI's chat completions, on a free port of this machine, for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GUARD_S = 60.0
"""How long a test waits for what comes at once, on a machine that is busy."""

Reply = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


class Server:
    """Notes each request and answers as `reply` says."""

    def __init__(self) -> None:
        self.reply: Reply = echo
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.over = threading.Event()
        """Set when the test is over: replies that hang wait for it."""
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.requests.append((self.path, dict(self.headers.items()), body))
                server.reply(self, body)

            def do_GET(self) -> None:
                with server._lock:
                    server.requests.append((self.path, dict(self.headers.items()), {}))

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, _, body in self.requests]

    def close(self) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(GUARD_S)


def send(
    handler: BaseHTTPRequestHandler, data: bytes, status: int = 200, **headers: object
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": len(data), **headers}.items():
        handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(data)


def completion(text: object) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    return json.dumps({"object": "chat.completion", "choices": [choice]}).encode()


def asked(body: dict[str, Any]) -> str:
    """The problem and the attempt, as the tests' template joins them."""
    return body["messages"][-1]["content"]


def echo(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    send(handler, completion(f"on {asked(body)}"))


def then(*replies: Reply) -> Reply:
    """The first reply to the first request, and so on; the last one from there on."""
    left = list(replies)
    return lambda handler, body: (left.pop(0) if len(left) > 1 else left[0])(handler, body)


def status(code: int, data: bytes = b"", **headers: object) -> Reply:
    return lambda handler, body: send(handler, data, code, **headers)
