"""Serving: many texts generated at once by one model, in pages, behind a local HTTP server."""

from fmlab.train.serve.batching import Batcher, Event, Request
from fmlab.train.serve.server import Server

__all__ = ["Batcher", "Event", "Request", "Server"]
