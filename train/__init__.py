"""The training loop and what it needs: configuration, optimizer, checkpoints, logging."""

from train.interruption import end_at_ctrl_c

# python -m train imports this first
end_at_ctrl_c()
