"""What a work tile costs: ``cost_table`` holds and interpolates, ``lookup`` finds the table that
fits, ``profile_cpu`` and ``profile_gpu`` measure one; those shipped are in ``tables``."""
