"""The decoder: its configuration, its rotary table, its forward pass."""
