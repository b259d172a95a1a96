"""Text to tokens on disk to batches: sources, tokenizers, shards, preparation and the loader."""
