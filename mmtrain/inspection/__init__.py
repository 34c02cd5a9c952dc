"""Show shards before a run: `mmtrain inspect`."""
