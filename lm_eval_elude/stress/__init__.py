"""What whoever holds a checkpoint's weights can bring back: attacks on the weights, the same on the reference."""
