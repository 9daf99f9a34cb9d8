"""What the runtime costs per step when nothing happens."""
