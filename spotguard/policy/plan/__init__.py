"""Pure arithmetic on prices, budgets and node counts; no clock, no input or output."""
