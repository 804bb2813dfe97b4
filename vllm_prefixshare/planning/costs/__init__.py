"""Cost models: the time of a work tile.

``model`` is their interface, ``table`` a measured one, ``roofline`` an estimate; ``rates`` holds
the few numbers that planning uses. ``lookup`` finds the table that fits; shipped tables are in
``tables``. ``vllm_prefixshare.profiling`` measures tables.
"""
