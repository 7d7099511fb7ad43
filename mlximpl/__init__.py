"""KV caches for MLX: mlx-lm's classes by name and shape, held to a written specification."""

from .arrays_cache import ArraysCache
from .attention import attention
from .batch_kv_cache import BatchKVCache
from .batch_rotating_kv_cache import BatchRotatingKVCache
from .cache_list import CacheList
from .chunked_kv_cache import ChunkedKVCache
from .concatenate_kv_cache import ConcatenateKVCache
from .file_error import PromptCacheFileError
from .filter import filter_rows
from .from_mlx_lm import from_mlx_lm
from .install import install, uninstall
from .kv_cache import KVCache
from .load_prompt_file import load_prompt_cache
from .mapped_file import MappedFile
from .masks import decode_mask, ring_mask
from .merge import MergedRows, merge_rows
from .padding import roll_rows
from .prompt_cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from .quantized_kv_cache import QuantizedKVCache
from .rotating_kv_cache import RotatingKVCache
from .save_prompt_file import save_prompt_cache
from .temporal_order import temporal_view
from .to_mlx_lm import to_mlx_lm
from .upstream import MlxLmVersionError

__version__ = "0.1.0"

__all__ = [
    "ArraysCache",
    "BatchKVCache",
    "BatchRotatingKVCache",
    "CacheList",
    "ChunkedKVCache",
    "ConcatenateKVCache",
    "KVCache",
    "MappedFile",
    "MergedRows",
    "MlxLmVersionError",
    "PromptCacheFileError",
    "QuantizedKVCache",
    "RotatingKVCache",
    "attention",
    "can_trim_prompt_cache",
    "decode_mask",
    "filter_rows",
    "from_mlx_lm",
    "install",
    "load_prompt_cache",
    "make_prompt_cache",
    "merge_rows",
    "ring_mask",
    "roll_rows",
    "save_prompt_cache",
    "temporal_view",
    "to_mlx_lm",
    "trim_prompt_cache",
    "uninstall",
]
