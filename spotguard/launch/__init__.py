"""Launchers: how nodes come and go. `base` is the protocol, `local` runs them on this machine."""
