"""Tests of the launcher, most of them on real processes."""
