"""Which settings prepare fastest on a clone in the storage: a search that measures."""
