"""Backends: one small interface over the devices that training runs on."""

from fmlab.backends.base import Backend, MatmulPrecision, Precision
from fmlab.backends.registry import available_backends, backend_names, check_backend, get_backend

__all__ = [
    "Backend",
    "MatmulPrecision",
    "Precision",
    "available_backends",
    "backend_names",
    "check_backend",
    "get_backend",
]
