"""A small HTTP server on this machine with an OpenAI-style completions route.

    GET  /health           is it alive
    GET  /v1/models        what it serves
    GET  /metrics          what it has done, as JSON
    POST /v1/completions   continue a text; with "stream": true as server-sent events

It is for trying out and measuring, for clients on this machine: no TLS, no accounts.
"""

import json
import select
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from fmlab.addresses import is_loopback
from fmlab.train.serve.api import BadRequest, Completion, answer, error_body, parse_completion
from fmlab.train.serve.batching import Batcher
from fmlab.train.serve.text import TextStream
from fmlab.train.serve.worker import Busy, Stream, Worker

MAX_BODY = 1 << 20  # bytes


class Server:
    """Serves a model until closed: `with Server(model, tokenizer) as server: ... server.url`.

    Args:
        port: 0 for any free one. host: of this machine; the default is reached from this machine only, and
            another one is warned about: whoever reaches it can use the model.
        max_waiting: requests that may wait; more get status 429.
        pages, page_size, max_batch, continuous: see Batcher.

    Raises OSError when the port is taken, ValueError for an empty host.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        name: str = "fmlab",
        host: str = "127.0.0.1",
        port: int = 0,
        max_waiting: int = 64,
        **batching: Any,
    ):
        if not host:
            raise ValueError("host is empty, which would be all addresses; write 0.0.0.0 if that is meant")
        if not is_loopback(host):
            warnings.warn(
                f"host {host}: everyone who reaches this machine there can use the model, without a password "
                "and unencrypted; 127.0.0.1 is for this machine alone",
                stacklevel=2,
            )
        self.tokenizer, self.name = tokenizer, name
        batching.setdefault("num_tokens", min(tokenizer.vocab_size, model.config.vocab_size))
        self.batcher = Batcher(model, end_of_text=getattr(tokenizer, "end_of_text", None), **batching)
        try:
            self._http = _HTTP((host, port), _Handler)
        except OSError as error:
            raise OSError(
                f"port {port} of {host} cannot be had ({error.strerror}); choose another, "
                "or 0 for any free one"
            ) from error
        self._http.owner = self
        self.worker = Worker(self.batcher, max_waiting)
        self._thread = threading.Thread(target=self._http.serve_forever, name="fmlab-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the server, http://host:port."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def metrics(self) -> dict[str, Any]:
        """Counts so far, and how full it is."""
        pool = self.batcher.pool
        return {
            **asdict(self.batcher.counts),
            "pending": self.worker.pending,
            "pages": pool.pages,
            "pages_free": pool.free,
        }

    def close(self) -> None:
        """Stop taking requests, end those that run, and free the port."""
        self._http.shutdown()
        self._http.server_close()
        self.worker.stop()
        self._http.hang_up()
        self._thread.join(timeout=30)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _HTTP(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: Server

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._open: dict[Any, threading.Thread | None] = {}  # connections, and who serves them

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        self._open[request] = threading.current_thread()
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def hang_up(self, patience: float = 5.0) -> None:
        """End all connections: what is being written may be finished, for so many seconds at most."""
        for how in (socket.SHUT_RD, socket.SHUT_RDWR):
            connections = list(self._open.items())
            for connection, _ in connections:
                with suppress(OSError):
                    connection.shutdown(how)
            deadline = time.monotonic() + patience
            for _, thread in connections:
                if thread is not None:
                    thread.join(timeout=max(0.0, deadline - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a client that says nothing
    server: _HTTP
    _chunked = True  # the stream, see _stream
    _unread = False  # whether some of the body is still to come, so that the connection is of no more use

    def do_GET(self) -> None:
        owner = self.server.owner
        # A body, which no route here has, would be read as the next request.
        close = self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers
        routes: dict[str, Any] = {
            "/health": lambda: {"status": "failed" if owner.worker.failure else "ok"},
            "/v1/models": lambda: {"object": "list", "data": [{"id": owner.name, "object": "model"}]},
            "/metrics": owner.metrics,
        }
        path = self.path.split("?")[0]
        if path == "/v1/completions":
            self._send(405, error_body("a completion is asked for by POST, with a JSON body"), close)
            return
        if path not in routes:
            message = f"no such route: {path}; there are: {', '.join(routes)}, /v1/completions"
            self._send(404, error_body(message), close)
            return
        body = routes[path]()
        self._send(503 if body.get("status") == "failed" else 200, body, close)

    def do_POST(self) -> None:
        if self.path.split("?")[0] != "/v1/completions":
            self._send(
                404, error_body(f"no such route: {self.path}; POST goes to /v1/completions"), close=True
            )
            return
        owner, self._unread = self.server.owner, True
        try:
            completion = parse_completion(self._body(), owner.tokenizer)
            stream = owner.worker.stream(completion.request)
        except BadRequest as error:
            self._send(error.status, error_body(str(error), error.field), close=self._unread)
        except Busy as error:
            self._send(429, error_body(str(error)))
        except RuntimeError as error:
            self._send(503, error_body(str(error)))
        else:
            try:
                self._stream(completion, stream) if completion.stream else self._whole(completion, stream)
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                self.close_connection = True  # the client has gone
            except RuntimeError as error:
                self._send(503, error_body(str(error)), close=True)
            finally:
                stream.close()

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            raise BadRequest("send the body in one piece, with its length in Content-Length", status=411)
        if int(length) > MAX_BODY:
            raise BadRequest(f"the body has {length} bytes; at most {MAX_BODY} are taken", status=413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise BadRequest(f"the body ended after {len(body)} of {length} bytes")
        self._unread = False
        return body

    def _pieces(self, completion: Completion, stream: Stream) -> Iterator[tuple[str, str | None, int]]:
        """(piece of text, reason when it is the last one, tokens so far)."""
        text = TextStream(self.server.owner.tokenizer, completion.stop)
        for event in stream:
            piece = "" if event.token is None else text.push(event.token)
            reason = "stop" if text.stopped else event.reason
            if reason is not None:
                yield piece + text.finish(), reason, len(text.tokens)
                return
            if piece:
                yield piece, None, len(text.tokens)
            if self._client_gone():
                raise BrokenPipeError

    def _whole(self, completion: Completion, stream: Stream) -> None:
        owner, pieces = self.server.owner, list(self._pieces(completion, stream))
        text = completion.echo + "".join(piece for piece, _, _ in pieces)
        usage = (len(completion.request.prompt), pieces[-1][2])
        self._send(200, answer(stream.number, owner.name, text, pieces[-1][1], usage))

    def _stream(self, completion: Completion, stream: Stream) -> None:
        """Server-sent events, ended by [DONE]; in chunks, which clients of HTTP/1.0 do not know."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self._chunked = self.request_version != "HTTP/1.0"
        self.send_header(*(("Transfer-Encoding", "chunked") if self._chunked else ("Connection", "close")))
        self.end_headers()
        name, first = self.server.owner.name, completion.echo
        try:
            for piece, reason, new in self._pieces(completion, stream):
                usage = None if reason is None else (len(completion.request.prompt), new)
                body = answer(stream.number, name, first + piece, reason, usage)
                self._chunk(f"data: {json.dumps(body)}\n\n")
                first = ""
            self._chunk("data: [DONE]\n\n")
        except RuntimeError as error:  # too late for a status
            self._chunk(f"data: {json.dumps(error_body(str(error)))}\n\n")
        self._chunk("")

    def _chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n" if self._chunked else data)

    def _client_gone(self) -> bool:
        """Whether the other side has closed the connection while we were writing its text."""
        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def _send(self, status: int, body: dict[str, Any], close: bool = False) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if close:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what happened is in /metrics."""
