"""What shards hold, before a run: `mmtrain inspect`."""
