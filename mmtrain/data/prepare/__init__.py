"""From files of rows to shards: `mmtrain shard`."""
