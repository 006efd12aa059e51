"""The block index: `block_index` is its interface, `reference` and `native` are its twins."""
