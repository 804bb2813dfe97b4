"""Every change made to vLLM at run time. Its files stay as released.

``registry`` lists the hooks and installs them: at once where the module that a hook changes is
loaded, else when it is imported (``imports``). ``selection`` lets the backend be chosen,
``block_tables`` keeps block ids on the host, ``lifecycle`` follows sleep and wake-up.
"""
