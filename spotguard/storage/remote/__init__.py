"""A bucket as an object store: parts in parallel, deadlines, conditional writes."""
