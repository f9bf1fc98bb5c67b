"""The norms of a converted model: which modules they replace, and how masks reach them."""
