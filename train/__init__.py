"""The training loop and what it needs: configuration, optimizer, checkpoints, logging."""
