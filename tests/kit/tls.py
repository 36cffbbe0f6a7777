"""A certificate for 127.0.0.1 that nobody trusts, with its key; for servers of tests."""

from __future__ import annotations

from pathlib import Path

CERTIFICATE = Path(__file__).with_name("tls.pem")
