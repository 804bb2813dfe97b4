"""The router of ``serve_qa.py``. Ray sends this file to where it routes."""

from typing import Any

from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve.llm.request_router import PrefixCacheAffinityRouter

#: Value of OpenAI's field ``user`` with which a request may go to any replica.
ANYWHERE = "anywhere"


class ByPrefixUnlessTold(PrefixCacheAffinityRouter):
    """Ray's router by prefix. Requests of the user ``ANYWHERE`` go where Ray's default router sends
    them, so that the same replicas show the difference.
    """

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Lists of replicas, the best first. Arguments as Ray's."""
        asked = pending_request.args[0] if pending_request and pending_request.args else None
        if getattr(asked, "user", None) == ANYWHERE:
            rule = PowerOfTwoChoicesRequestRouter.choose_replicas
        else:
            rule = PrefixCacheAffinityRouter.choose_replicas
        return await rule(self, candidate_replicas, pending_request)
