"""Measured costs: ``measure`` fills a cost table, ``tables`` finds the right one."""
