"""Replicas of several ranks, by every stack, under fire; against one process without any of it."""
