"""Where to run, when to wait, when to pay: the policy and its rivals on recorded markets."""
