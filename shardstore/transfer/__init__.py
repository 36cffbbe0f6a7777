"""Carries plans out: memory to a store and back, hashed, on threads. No torch: memory is known by address."""

from __future__ import annotations

from shardstore.transfer.read import Outcome, Reader, damaged
from shardstore.transfer.runs import Job
from shardstore.transfer.write import HashedBody, in_parallel, put_all

__all__ = ["HashedBody", "Job", "Outcome", "Reader", "damaged", "in_parallel", "put_all"]
