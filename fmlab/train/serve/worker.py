"""The thread that runs the model: requests come in by one queue, answers leave by one queue each."""

import queue
import threading
from collections.abc import Iterator

from fmlab.train.serve.api import BadRequest
from fmlab.train.serve.batching import Batcher, Event, Request


class Busy(RuntimeError):
    """As many requests wait as may wait."""


class Worker:
    """Runs a Batcher in one thread, which alone touches it; the methods may be called from any thread.

    max_waiting: requests that may wait beside those that run; more are turned away.
    """

    def __init__(self, batcher: Batcher, max_waiting: int = 64):
        self.batcher, self.max_waiting = batcher, max_waiting
        self.failure: BaseException | None = None
        self._ended = False
        self._todo: queue.SimpleQueue[tuple[str, object] | None] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[Event | None]] = {}
        self._pending = 0  # submitted and not finished
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fmlab-serve", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Requests that wait or run."""
        return self._pending

    def stream(self, request: Request) -> "Stream":
        """Submit a request; its events. Raises BadRequest, Busy, or RuntimeError if the model has failed."""
        try:
            self.batcher.check(request)  # reads only what never changes
        except ValueError as error:
            raise BadRequest(str(error).replace("max_new_tokens", "max_tokens")) from error  # as clients say
        with self._lock:
            if self.failure is not None:
                raise RuntimeError(f"the model has failed: {self.failure}")
            if self._ended:
                raise RuntimeError("the server is closing")
            if self._pending >= self.max_waiting + self.batcher.max_batch:
                raise Busy(f"{self._pending} requests are waiting or running already; try again later")
            self._pending += 1
            stream = Stream(self, request)
            self._todo.put(("submit", stream))  # under the lock: never after the last look at the queue
        return stream

    def stop(self) -> None:
        """End the thread; whoever waits for events gets no more."""
        self._todo.put(None)
        self._thread.join(timeout=30)

    def _cancel(self, stream: "Stream") -> None:
        self._todo.put(("cancel", stream))

    def _run(self) -> None:
        streams: dict[int, Stream] = {}
        try:
            while self._take_orders(streams):
                for event in self.batcher.step():
                    self._deliver(streams, event)
        except BaseException as error:
            self.failure = error
        with self._lock:
            self._ended = True
        for stream in streams.values():
            stream.events.put(None)
        while not self._todo.empty():
            order = self._todo.get()
            if order is not None and order[0] == "submit":
                order[1].events.put(None)  # type: ignore[attr-defined]

    def _take_orders(self, streams: dict[int, "Stream"]) -> bool:
        """Do what was ordered; sleep while there is nothing to run. False when it is time to stop."""
        while self.batcher.idle or not self._todo.empty():
            order = self._todo.get()
            if order is None:
                return False
            what, stream = order
            assert isinstance(stream, Stream)
            if what == "submit":
                stream.number = self.batcher.submit(stream.request)
                streams[stream.number] = stream
            elif streams.pop(stream.number, None) is not None:
                self.batcher.cancel(stream.number)
                self._finished()
        return True

    def _deliver(self, streams: dict[int, "Stream"], event: Event) -> None:
        streams[event.request_id].events.put(event)
        if event.reason is not None:
            del streams[event.request_id]
            self._finished()

    def _finished(self) -> None:
        with self._lock:
            self._pending -= 1


class Stream:
    """The events of one request, to be read by one thread; `close` ends it early."""

    def __init__(self, worker: Worker, request: Request):
        self.worker, self.request, self.number = worker, request, -1
        self.events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Event]:
        """Events until the request has ended. Raises RuntimeError when the model failed on the way."""
        while True:
            event = self.events.get()
            if event is None:
                raise RuntimeError(f"the model stopped: {self.worker.failure or 'the server is closing'}")
            yield event
            if event.reason is not None:
                return

    def close(self) -> None:
        """Cancel the request, if it has not ended: its pages serve someone else."""
        self.worker._cancel(self)
