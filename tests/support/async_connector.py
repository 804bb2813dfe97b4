"""vLLM's example connector, which loads KV of a stored prompt while other requests run."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
)


@dataclass
class LoadsOfRequests(ExampleConnectorMetadata):
    """What the workers do in a step. loads: id of a request, and the load in the base's form."""

    loads: dict[str, ExampleConnectorMetadata] = field(default_factory=dict)


class AsyncExampleConnector(ExampleConnector):
    """Loads in the step after the one in which the scheduler asks, while requests wait for it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._asked: dict[str, ExampleConnectorMetadata] = {}
        self._layers: dict[str, Any] = {}
        self._pending: dict[str, ExampleConnectorMetadata] = {}
        self._loaded: set[str] = set()

    # in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        num_tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(num_tokens or 0, 0), bool(num_tokens and num_tokens > 0)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            load = self._asked[request.request_id] = ExampleConnectorMetadata()
            load.add_request(
                request.prompt_token_ids, blocks.get_block_ids()[0], self._block_size, False, []
            )

    def build_connector_meta(self, scheduler_output: Any) -> LoadsOfRequests:
        meta = super().build_connector_meta(scheduler_output)
        asked, self._asked = self._asked, {}
        return LoadsOfRequests(meta.requests, asked)

    # in a worker

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        self._layers = forward_context.no_compile_layers
        self._loaded |= self._pending.keys()
        for load in self._pending.values():
            self.bind_connector_metadata(load)
            # a step that only waits has no metadata; the base asks its type alone
            layers = SimpleNamespace(
                attn_metadata=dict.fromkeys(self._layers), no_compile_layers=self._layers
            )
            super().start_load_kv(layers)
        self._pending = dict(meta.loads)
        self.bind_connector_metadata(meta)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        loaded, self._loaded = self._loaded, set()
        return None, loaded or None
