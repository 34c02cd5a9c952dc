"""Rows become samples, shards and packs: `prepare`, `samples`, `shards`, `stream`."""
