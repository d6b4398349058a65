"""ReCoVer: pre-training that does not stop when hardware dies."""
