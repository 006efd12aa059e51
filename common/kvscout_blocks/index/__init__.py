"""The block index: `block_index` is its interface, `backend` chooses between `native` and `reference`."""
