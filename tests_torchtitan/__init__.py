"""Jobs of torchtitan, in an environment of its own: `make test-torchtitan`."""
