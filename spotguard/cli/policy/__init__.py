"""Commands about spot markets: what is known of them, and what a policy would do there."""
