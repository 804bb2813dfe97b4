"""Run a DecodePlan. A room per kernel (``hopper``, ``portable``, ``cpu``); ``contract`` is what a
kernel on a GPU offers, ``registry`` chooses one, ``gpu_executor`` runs it. ``reference`` is
attention in float64, for tests."""
