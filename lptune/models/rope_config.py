"""Reads the rope settings of config.json, in the old and new spellings.

Old files have `rope_theta` and `rope_scaling`, with the kind of rope as `rope_type` or, even older, `type`.
Files of transformers 5 have both in `rope_parameters`; a family with two kinds of layers has one object for
each kind there. `rope_scaling` has priority over `rope_parameters`. A `rope_theta` inside of them has
priority over one outside. A file that transformers does not load raises UserError.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from lptune.models.config import RopeConfig
from lptune.models.keys import Keys

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ALL_KINDS: Mapping[str, str] = MappingProxyType({kind: kind for kind in ROPE_KINDS})


def read_rope(
    keys: Keys,
    *,
    head_dim: int,
    default_theta: float = 10_000.0,
    kinds: Mapping[str, str] = _ALL_KINDS,
    partial: bool = False,
    interleaved: bool = False,
) -> RopeConfig:
    """The rope of a family with one rope for all layers. Raises UserError for an unsupported setting.

    kinds: maps the kinds that files may name to ROPE_KINDS, or to `alpha`: the default kind with theta
    multiplied by alpha ** (D / (D - 2)), one stretch ("NTK-aware") for all lengths. partial: whether only a
    part of each head may be rotated. default_theta: for a file without rope_theta. interleaved: as the field.
    """
    settings, name = _settings(keys, "rope_parameters", keys.get("rope_parameters")), "rope_parameters"
    if keys.get("rope_scaling"):
        settings, name = _settings(keys, "rope_scaling", keys.get("rope_scaling")), "rope_scaling"
    if any(isinstance(value, dict) for value in settings.values()) or settings.keys() & LAYER_TYPES:
        raise keys.error(
            name, f"settings per kind of layer are not part of the {keys.text('model_type')} family"
        )
    settings.setdefault("rope_theta", keys.given.get("rope_theta", default_theta))
    part = keys.given.get("partial_rotary_factor", 1.0)
    settings.setdefault("partial_rotary_factor", 1.0 if part is None and not partial else part)
    # The outer value has priority, as in transformers (Phi-3 has it there). The type su also needs an inner.
    original = "original_max_position_embeddings"
    is_su = settings.get("rope_type", settings.get("type")) == "su"
    if keys.has(original) and (original in settings or not is_su):
        settings[original] = keys.get(original)
    rope = parse_rope(keys, name, settings, head_dim=head_dim, kinds=kinds, partial=partial)
    return replace(rope, interleaved=interleaved)


def read_rope_per_layer_type(
    keys: Keys, *, head_dim: int, global_theta: float, local_theta: Any
) -> dict[str, RopeConfig]:
    """The rope settings, by layer type, of a family with one rope for each layer type. `rope_scaling` belongs
    to the layers with full attention. Raises UserError for an unsupported setting.

    global_theta: of these layers, for a file without rope_theta. local_theta: of the layers with a window, if
    their own settings do not say; any value, checked here.
    """
    nested = _settings(keys, "rope_parameters", keys.get("rope_parameters"))
    if not nested.keys() <= LAYER_TYPES:
        raise keys.error(
            "rope_parameters", "expected an object for each of " + " and ".join(sorted(LAYER_TYPES))
        )
    full = _settings(keys, "rope_parameters", nested.get("full_attention"))
    sliding = _settings(keys, "rope_parameters", nested.get("sliding_attention"))
    scaling = keys.get("rope_scaling")
    if scaling is not None:
        if keys.get("rope_parameters") is not None and nested.get("full_attention") is None:
            raise keys.error("rope_scaling", "contradicts rope_parameters, which has no full_attention")
        scaling = _settings(keys, "rope_scaling", scaling)
        if any(isinstance(value, dict) for value in scaling.values()):
            raise keys.error(
                "rope_scaling", "belongs to the full_attention layers; move it to rope_parameters"
            )
        if "type" in scaling and "rope_type" not in scaling:  # transformers would take the default rope
            raise keys.error("rope_scaling", "says type, which transformers ignores here; call it rope_type")
        full.update(scaling)
    full.setdefault("rope_theta", keys.given.get("rope_theta", global_theta))
    sliding.setdefault("rope_theta", local_theta)
    for settings in (full, sliding):
        if not settings.get("truncate", True):
            raise keys.error(
                "rope_parameters", "truncate: transformers ignores it per kind of layer; take it out"
            )
        part = keys.get("partial_rotary_factor")
        settings.setdefault("partial_rotary_factor", 1.0 if part is None else part)
    return {
        "full_attention": parse_rope(keys, "rope_parameters", full, head_dim=head_dim),
        "sliding_attention": parse_rope(keys, "rope_parameters", sliding, head_dim=head_dim),
    }


def _settings(keys: Keys, name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise keys.error(name, f"expected an object, found {value!r}")
    return dict(value)


def parse_rope(
    keys: Keys,
    name: str,
    settings: dict[str, Any],
    *,
    head_dim: int,
    kinds: Mapping[str, str] = _ALL_KINDS,
    partial: bool = False,
) -> RopeConfig:
    """Reads one settings object, which has rope_theta, as a RopeConfig. Other arguments as in `read_rope`.

    A key with the value null is an error, not a missing key, because transformers fails on it.
    """
    said = settings.get("rope_type", settings.get("type", "default"))
    if not isinstance(said, str) or said not in kinds:
        raise keys.error(name, f"rope type {said!r} is not supported (supported: {', '.join(kinds)})")
    kind = kinds[said]
    inner = Keys(settings, {}, f"{keys.where}: {name}")
    theta = inner.number("rope_theta")
    if theta <= 1:
        raise inner.error("rope_theta", f"must be above 1, found {theta}")
    partial_factor = inner.number("partial_rotary_factor")
    if partial_factor != 1.0 and not partial:
        raise keys.error("partial_rotary_factor", f"only 1.0 is part of this family, found {partial_factor}")
    rotary_dim = int(head_dim * partial_factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise keys.error(name, f"rope needs an even number of rotated dimensions, found {rotary_dim}")
    base = RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if kind == "default":
        return base
    if kind == "alpha":
        alpha, _ = inner.number("alpha"), inner.number("factor")  # transformers needs the second, unused
        if rotary_dim < 4 or alpha > 1e9:
            raise inner.error("alpha", f"{alpha} cannot stretch {rotary_dim} dimensions")
        return RopeConfig(theta=theta * alpha ** (rotary_dim / (rotary_dim - 2)), rotary_dim=rotary_dim)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, factor=inner.number("factor"))

    max_len = keys.integer("max_position_embeddings")
    if said == "su" and not inner.has("original_max_position_embeddings"):
        raise inner.error("original_max_position_embeddings", "missing beside the type su")
    original_len = (
        inner.integer("original_max_position_embeddings")
        if inner.has("original_max_position_embeddings")
        else max_len
    )
    if original_len < 2:
        raise inner.error("original_max_position_embeddings", f"must be above 1, found {original_len}")
    if kind == "llama3":
        llama3 = RopeConfig(
            kind=kind,
            theta=theta,
            rotary_dim=rotary_dim,
            factor=inner.number("factor"),
            original_max_position_embeddings=original_len,
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
        )
        if llama3.low_freq_factor >= llama3.high_freq_factor:
            raise inner.error("high_freq_factor", f"must be above low_freq_factor {llama3.low_freq_factor}")
        return llama3
    factor = inner.optional_number("factor") or max_len / original_len
    if kind == "yarn":
        if not inner.has("factor"):
            raise inner.error("factor", "missing; yarn needs it")
        return RopeConfig(
            kind=kind,
            theta=theta,
            rotary_dim=rotary_dim,
            factor=factor,
            original_max_position_embeddings=original_len,
            attention_factor=inner.optional_number("attention_factor")
            or _yarn_attention_factor(inner, factor),
            beta_fast=inner.optional_number("beta_fast") or 32.0,
            beta_slow=inner.optional_number("beta_slow") or 1.0,
            truncate=inner.flag("truncate") if "truncate" in settings else True,
        )
    stretch = math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0
    longrope = RopeConfig(
        kind=kind,
        theta=theta,
        rotary_dim=rotary_dim,
        original_max_position_embeddings=original_len,
        attention_factor=inner.optional_number("attention_factor") or stretch,
        short_factor=inner.numbers("short_factor"),
        long_factor=inner.numbers("long_factor"),
    )
    for key, found in (("short_factor", longrope.short_factor), ("long_factor", longrope.long_factor)):
        if len(found) != rotary_dim // 2:
            raise inner.error(key, f"expected {rotary_dim // 2} numbers, found {len(found)}")
    return longrope


def _yarn_attention_factor(inner: Keys, factor: float) -> float:
    """The factor of cos and sin for a stretch: 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4)."""

    def mscale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = inner.get("mscale"), inner.get("mscale_all_dim")
    if over and under:
        return mscale(inner.number("mscale")) / mscale(inner.number("mscale_all_dim"))
    return mscale(1.0)
