"""Every change made to vLLM at run time. Its files stay as released.

``registry`` lists the hooks and installs them: at once where the module that a hook changes is
loaded, else when it is imported (``imports``). ``selection`` lets the backend be chosen,
``runners`` has the hooks on model runners and workers, and the other modules have one part each of
the shared host work.
"""
