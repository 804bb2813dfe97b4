"""The executors for CPUs: ``native`` in C, ``torch`` in torch operators; ``executor`` chooses."""
