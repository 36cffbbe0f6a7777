"""`make torture`: trainings are killed at random moments on three kinds of stores, and must not be harmed by it."""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.torture.killing import Count, Torture, torturing
from tests.torture.places import PLACES


def main() -> int:
    """Returns 1 where anything was lost or different."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="on each store; default 200")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the moments; default a random one")
    parser.add_argument("--stores", nargs="+", choices=list(PLACES), default=list(PLACES))
    arguments = parser.parse_args()
    print(
        f"seed {arguments.seed}: SIGKILL at random moments, {arguments.kills} on each of {', '.join(arguments.stores)}"
    )
    counts = list(_counts(arguments.stores, arguments.kills, arguments.seed))
    bad = [line for count in counts for line in (*count.losses, *count.differences)]
    print(f"{sum(count.kills for count in counts)} killed, {len(bad)} losses and differences", *bad, sep="\n")
    return 1 if bad or len(counts) < len(arguments.stores) else 0


def _counts(stores: list[str], kills: int, seed: int) -> Iterator[Count]:
    with tempfile.TemporaryDirectory(prefix="shardstore-torture-") as folder, ExitStack() as stack:
        scratch = Path(folder)
        zygote, expected = stack.enter_context(torturing(scratch))
        for name in stores:
            try:
                place = stack.enter_context(PLACES[name](scratch / name))
            except pytest.skip.Exception as missing:
                print(f"{name:<6} not possible here: {missing}")
                continue
            torture = Torture(zygote, place, random.Random(f"{seed}-{name}"), scratch)
            print(torture.run(kills, expected), flush=True)
            yield torture.count


if __name__ == "__main__":
    sys.exit(main())
