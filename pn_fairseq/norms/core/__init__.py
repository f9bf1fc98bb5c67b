"""What all norms share: channels, state, steps, and how they are compiled and sharded."""
