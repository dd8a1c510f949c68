"""What the drafters with weights of their own share: checkpoints, blocks, and rows of state."""
