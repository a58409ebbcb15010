"""Attention over packed rows: one formula, five backends. `choose_backend` chooses one for each forward.

    scores = softcap(q @ k.T * scale);  out = softmax(scores where visible, in float32) @ v

- `varlen` (CUDA, half precision): flash attention over the flattened tokens. Offsets mark where documents
  begin, so it computes nothing for pairs of different documents. Its window argument counts the keys to the
  left of the query, without the query's own key.
- `flex` (CUDA, soft-capped): flash attention has no soft-cap. flex_attention compiles the soft-cap into its
  kernel, and skips blocks in which nothing is visible.
- `documents` (CPU, rows of several documents): torch's flash attention for the CPU, called for each document,
  so that it too computes nothing for pairs of different documents (document_attention.py).
- `sdpa` (all other cases): scaled_dot_product_attention with a boolean mask, which is made once per forward
  and kind of layer.
- `explicit` (soft-capped, not on CUDA): the formula as written. It keeps all scores of a layer in memory.

Grouped queries: with N query heads and M key heads, each key head serves N / M consecutive query heads.

torch's modules for `varlen` and `flex` are imported inside of functions: two of them import the compiler,
which a run without compilation does not need.

Shapes: B batch, S sequence, T = B * S, N query heads, M key heads, D head size.
"""

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lptune.hardware.planned import HOPPER, constant_result, planned, planned_device_type
from lptune.models.config import DecoderConfig, LayerConfig
from lptune.models.context import Group, to_heads, to_tokens
from lptune.models.document_attention import attend_documents
from lptune.models.documents import DocumentBounds, Visibility, visibility_blocks, visibility_mask
from lptune.models.facts import Facts

BACKENDS = ("varlen", "flex", "documents", "sdpa", "explicit")

# The largest head size of the flash kernels that varlen uses.
_VARLEN_MAX_HEAD_DIM = 256
# In float32, smaller rows (query heads * head size * tokens) are faster with a mask: there a call for each
# document costs more than the scores that it saves. In bfloat16, a mask is slower at any size, except
# for documents of about 5 tokens.
_MIN_FLOAT32_ROW = 2**15


def choose_backend(
    config: Facts,
    device: torch.device,
    dtype: torch.dtype,
    *,
    one_document_per_row: bool = False,
    seq_len: int | None = None,
) -> str:
    """The backend, one of BACKENDS, for a model on this device in this compute dtype. Depends only on the
    arguments. one_document_per_row: whether no row has several documents. seq_len: of the rows, in tokens;
    None: long.
    """
    device_type = planned_device_type() or device.type
    is_cuda = device_type == "cuda"
    if config.has_sinks:
        return "sdpa"
    if config.attention_softcap is not None:
        return "flex" if is_cuda else "explicit"
    has_flash = (
        is_cuda
        and dtype in (torch.float16, torch.bfloat16)
        and config.head_dim <= _VARLEN_MAX_HEAD_DIM
        and config.head_dim % 8 == 0
        and _compute_capability(device) >= (8, 0)
    )
    if has_flash:
        return "varlen"
    if device_type != "cpu" or one_document_per_row:
        return "sdpa"
    row_size = config.num_heads * config.head_dim * seq_len if seq_len is not None else _MIN_FLOAT32_ROW
    return "sdpa" if dtype == torch.float32 and row_size < _MIN_FLOAT32_ROW else "documents"


@constant_result  # compiling a whole model cannot trace calls of the CUDA driver
def _compute_capability(device: torch.device) -> tuple[int, int]:
    planned_device = planned()
    if planned_device is not None:
        return planned_device.capability
    if not torch.cuda.is_available():
        return HOPPER
    return torch.cuda.get_device_capability(device if device.type == "cuda" else None)


@constant_result
def _varlen_takes_groups() -> bool:
    # torch 2.11 has no argument for grouped queries. To be removed when we require torch >= 2.13.
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def make_visibility(
    backend: str,
    documents: DocumentBounds | None,
    batch: int,
    seq_len: int,
    window: int | None,
    device: torch.device,
) -> Visibility:
    """Which keys a query sees, in a layer with this window, in the form that the backend needs. documents:
    None if each row is one document.
    """
    if window is not None and window >= seq_len:
        window = None  # the window is at least as long as the row
    if backend == "varlen" or (backend == "flex" and planned_device_type()):
        offsets = documents.offsets if documents else DocumentBounds.single(batch, seq_len, device).offsets
        return Visibility(offsets=offsets)
    if backend == "flex":
        return Visibility(blocks=visibility_blocks(documents, batch, seq_len, window, device))
    if backend == "documents" and documents is not None:
        return Visibility(document_offsets=documents.offsets)
    if backend in ("sdpa", "documents") and documents is None and window is None:
        return Visibility()  # causal attention needs no mask, and the kernels skip half of the work
    return Visibility(mask_B1SS=visibility_mask(documents, seq_len, window, device))


def make_visibilities(
    config: DecoderConfig,
    documents: DocumentBounds | None,
    batch: int,
    seq_len: int,
    device: torch.device,
    dtype: torch.dtype,
    group: Group | None = None,
) -> dict[LayerConfig, Visibility]:
    """One Visibility for each distinct LayerConfig. Those with the same window share it. seq_len: of whole
    rows, of which the ranks of `group` have a part each.
    """
    is_single = documents is None
    backend = choose_backend(config, device, dtype, one_document_per_row=is_single, seq_len=seq_len)
    windows = dict.fromkeys(layer.window for layer in config.layer_kinds)
    made = {w: make_visibility(backend, documents, batch, seq_len, w, device) for w in windows}
    by_window = {window: each._replace(group=group) for window, each in made.items()}
    return {layer: by_window[layer.window] for layer in config.layer_kinds}


def attend(
    q_BSND: Tensor,
    k_BSMD: Tensor,
    v_BSMD: Tensor,
    visible: Visibility,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The formula at the top of this file: (B, S, N, D) in the dtype of q. `visible` decides the backend.

    visible: from `make_visibility` with the same window. With `visible.past`, the queries also see the keys
    that it stores (cache.py); with `visible.group`, S are this rank's tokens. softcap: the backend must be
    `flex` or `explicit`.
    """
    if (group := visible.group) is not None:
        k_BSMD, v_BSMD, q_BSND = (to_heads(x, group) for x in (k_BSMD, v_BSMD, q_BSND))
        whole = visible._replace(group=None)
        found = attend(q_BSND, k_BSMD, v_BSMD, whole, scale=scale, window=window, softcap=softcap)
        return to_tokens(found, group)
    if visible.past is not None:
        k_BSMD, v_BSMD = visible.past.extend(k_BSMD, v_BSMD)
    if visible.offsets is not None:
        # flex cannot run on the fake tensors of a dry run. varlen saves the same tensors for backward.
        assert softcap is None or planned_device_type(), "varlen attention cannot soft-cap"
        return _varlen(q_BSND, k_BSMD, v_BSMD, visible.offsets, scale, window)
    if visible.document_offsets is not None:
        assert softcap is None, "attention by documents cannot soft-cap"
        return attend_documents(q_BSND, k_BSMD, v_BSMD, visible.document_offsets, scale, window)
    q_BNSD, k_BMSD, v_BMSD = (x.transpose(1, 2) for x in (q_BSND, k_BSMD, v_BSMD))
    if visible.blocks is not None:
        out_BNSD = _flex(q_BNSD, k_BMSD, v_BMSD, visible, scale, softcap)
    elif softcap is not None:
        out_BNSD = _explicit(q_BNSD, k_BMSD, v_BMSD, visible, scale, softcap)
    else:
        out_BNSD = F.scaled_dot_product_attention(
            q_BNSD,
            k_BMSD,
            v_BMSD,
            attn_mask=visible.mask_B1SS,
            is_causal=visible.mask_B1SS is None,
            scale=scale,
            enable_gqa=q_BNSD.shape[1] != k_BMSD.shape[1],
        )
    return out_BNSD.transpose(1, 2)


def _varlen(
    q_BSND: Tensor, k_BSMD: Tensor, v_BSMD: Tensor, offsets: Tensor, scale: float, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch, seq_len, num_heads, _ = q_BSND.shape
    num_groups = num_heads // k_BSMD.shape[2]
    options: dict[str, Any] = {}
    if num_groups > 1:
        if _varlen_takes_groups():
            options["enable_gqa"] = True
        else:
            k_BSMD, v_BSMD = (x.repeat_interleave(num_groups, dim=2) for x in (k_BSMD, v_BSMD))
    out_TND = varlen_attn(
        q_BSND.flatten(0, 1),
        k_BSMD.flatten(0, 1),
        v_BSMD.flatten(0, 1),
        offsets,
        offsets,
        seq_len,  # the longest possible document: a constant, so that the model is compiled only once
        seq_len,
        scale=scale,
        # (keys to the left of the query, keys to its right). Our window counts the query's own key too.
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    assert isinstance(out_TND, Tensor)
    return out_TND.view(batch, seq_len, num_heads, -1)


def _flex(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, visible: Visibility, scale: float, softcap: float | None
) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Tensor, b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap) if softcap is not None else score

    # Without compilation flex_attention keeps all scores in memory. In a compiled block it is compiled too.
    run = (
        torch.compile(flex_attention)
        if q_BNSD.is_cuda and not torch.compiler.is_compiling()
        else flex_attention
    )
    out_BNSD = run(
        q_BNSD,
        k_BMSD,
        v_BMSD,
        score_mod=capped,
        block_mask=visible.blocks,
        scale=scale,
        enable_gqa=q_BNSD.shape[1] != k_BMSD.shape[1],
    )
    assert isinstance(out_BNSD, Tensor)
    return out_BNSD


def _explicit(
    q_BNSD: Tensor, k_BMSD: Tensor, v_BMSD: Tensor, visible: Visibility, scale: float, softcap: float
) -> Tensor:
    assert visible.mask_B1SS is not None, "the explicit path needs a mask"
    num_groups = q_BNSD.shape[1] // k_BMSD.shape[1]
    k_BNSD, v_BNSD = (x.repeat_interleave(num_groups, dim=1) for x in (k_BMSD, v_BMSD))
    scores_BNSS = (q_BNSD @ k_BNSD.transpose(2, 3)).float() * scale
    scores_BNSS = softcap * torch.tanh(scores_BNSS / softcap)
    scores_BNSS = scores_BNSS.masked_fill(~visible.mask_B1SS, float("-inf"))
    return scores_BNSS.softmax(dim=-1).to(v_BNSD.dtype) @ v_BNSD
