"""Running a plan: the kernels, each in its own folder, and the executors around them.

``interface`` has the interfaces of executors and kernels, ``catalog`` what is known of each GPU
kernel without torch, ``registry`` chooses a GPU kernel for a layer, ``gpu_executor`` runs plans
with it. ``reference`` is attention in float64, for tests.
"""
