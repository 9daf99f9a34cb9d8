"""One line for training loops that others own: each module needs the extra of its name."""
