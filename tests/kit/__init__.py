"""Tools for tests: the conformance kit of the store port, and stores that fail, flip bits, wait or count."""
