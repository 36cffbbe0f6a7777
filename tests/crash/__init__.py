"""Saves that fail, die, sleep or race at every point: what is there afterwards is whole, or it is not there."""
