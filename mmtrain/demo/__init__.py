"""The demo's models, pictures, texts and shards."""
