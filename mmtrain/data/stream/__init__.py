"""From shards to micro-batches: the order of samples, their packs, their pictures."""
