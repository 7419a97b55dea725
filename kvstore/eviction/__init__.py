"""Which block goes first when room is needed: one policy a file, under the contract in `base`."""
