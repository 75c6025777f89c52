"""How tensors become bytes: numba kernels, block layouts, zstd chunks, digests."""
