"""Tests of the store that goes through obstore."""
