"""Tests of shardstore."""
