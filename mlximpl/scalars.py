"""The values of a state that are no arrays, as mlx-lm has them in files: a tensor, and its type in the metadata.

17     "scalar", I32 of shape []
"ab"   "string", I32 of shape [2], the code points
None   "none", F32 of shape [0]
"""

import struct

from .checksums import SHORT
from .file_facts import HALF
from .safetensors_header import Tensor
from .safetensors_writer import Item

FORMATS = {
    "BOOL": "<?",
    "U8": "<B",
    "I8": "<b",
    "U16": "<H",
    "I16": "<h",
    "U32": "<I",
    "I32": "<i",
    "U64": "<Q",
    "I64": "<q",
    "F32": "<f",
}


def check_scalar(path: str, leaf: object) -> object:
    """The value; ValueError for one that no state has."""
    fits = leaf is None
    if isinstance(leaf, str):
        fits = 4 * len(leaf) <= SHORT and not HALF.search(leaf)
    elif isinstance(leaf, int):
        fits = -(2**63) <= leaf < 2**63
    if not fits:
        raise ValueError(f"the state's value at {path} cannot be saved: {leaf!r:.80}")
    return leaf


def scalar_item(path: str, leaf: object) -> tuple[str, Item]:
    """The type and the tensor of a value.

    Raises:
        ValueError: it is neither None, nor a str, an int or a bool.
    """
    check_scalar(path, leaf)
    if isinstance(leaf, str):
        code_points = leaf.encode("utf-32-le")
        return "string", Item(path, "I32" if leaf else "F32", (len(leaf),), code_points)
    if isinstance(leaf, bool):
        return "scalar", Item(path, "BOOL", (), bytes([leaf]))
    if isinstance(leaf, int):
        width = 4 if -(2**31) <= leaf < 2**31 else 8
        return "scalar", Item(path, f"I{8 * width}", (), leaf.to_bytes(width, "little", signed=True))
    return "none", Item(path, "F32", (0,), b"")


def read_scalar(path: str, kind: str, tensor: Tensor, content: bytes) -> object:
    """The value that a tensor stands for.

    Raises:
        ValueError: the tensor is not one of that type.
    """
    if kind == "none" and not content:
        return None
    if kind == "string" and not content:
        return ""
    if kind == "string" and len(tensor.shape) == 1 and tensor.dtype in ("I32", "U32"):
        try:
            return content.decode("utf-32-le", "surrogatepass")
        except UnicodeDecodeError as error:
            raise ValueError(f"string {path!r} holds no code point at {error.start // 4}") from None
    if kind == "scalar" and tensor.dtype in FORMATS and len(content) == struct.calcsize(FORMATS[tensor.dtype]):
        value: object = struct.unpack(FORMATS[tensor.dtype], content)[0]
        return value
    raise ValueError(f"tensor {path!r} of dtype {tensor.dtype} and shape {list(tensor.shape)} is no {kind}")
