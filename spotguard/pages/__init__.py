"""What people look at: the report, the live dashboard, and what Prometheus reads.

Numbers come from `control`; words are put together here, and the pages' script only lays them out.
"""
