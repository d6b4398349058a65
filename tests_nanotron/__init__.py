"""Nanotron's parts, and its trainer, in real jobs. Run by `make test-nanotron`."""
