"""Many runs of one script under one budget: how they are begun, found, told of and ended."""
