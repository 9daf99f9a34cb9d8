"""What is made of a store: lines that grow without an append, clocks that are compared by it."""
