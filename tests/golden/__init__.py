"""Checkpoints of earlier versions, as files: every later version must read them. `make.py` wrote them."""
