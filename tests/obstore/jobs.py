"""Child processes that save through obstore, at the price of a fork: the parent itself never makes a request by it."""

from __future__ import annotations

from functools import partial

from tests.crash.zygote import _Server
from tests.s3 import jobs

if __name__ == "__main__":
    import obstore.store  # noqa: F401  so that the children have it

    _Server({"save": partial(jobs.save, engine="obstore")}).serve()
