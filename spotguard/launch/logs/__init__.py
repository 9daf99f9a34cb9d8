"""What a node's ranks print: masked, shown as ever, and shipped into the run store."""
