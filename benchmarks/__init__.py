"""Measurements that are run by hand: `python -m benchmarks.NAME` from the root of the checkout."""
