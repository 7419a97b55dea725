"""Where blocks are kept: one tier a file, under the contract in `base`."""
