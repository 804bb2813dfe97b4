"""What a work tile costs.

``model`` says what a cost model answers, ``table`` holds a measured one, ``roofline`` estimates,
``rates`` has the few numbers that planning asks for. ``lookup`` finds the table that fits,
``profile_cpu`` and ``profile_gpu`` measure one; those shipped are in ``tables``.
"""
