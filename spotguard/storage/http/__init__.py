"""HTTP for large objects: connections, time limits, bodies without a copy."""
