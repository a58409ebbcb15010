"""Reading rope settings out of config.json, in the spellings of the last four years.

Old files have `rope_theta` and `rope_scaling` (with the kind under `rope_type` or, older still, `type`);
files written by transformers 5 have both in `rope_parameters`, where a family with two kinds of layers has
one object per kind. `rope_scaling` wins over `rope_parameters`, and a `rope_theta` inside either wins over
the one outside.
"""

import math
from collections.abc import Mapping
from typing import Any

from lptune.models.config import RopeConfig
from lptune.models.keys import Keys

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


def read_rope(
    keys: Keys,
    *,
    head_dim: int,
    default_theta: float = 10_000.0,
    aliases: Mapping[str, str] | None = None,
    partial: bool = False,
) -> RopeConfig:
    """The one rope of a family; `aliases` renames kinds, `partial` allows rotating a part of the head."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    settings = _settings(keys, name, keys.get(name))
    _fill(settings, "rope_theta", keys.get("rope_theta"), default_theta)
    _fill(settings, "partial_rotary_factor", keys.get("partial_rotary_factor"), 1.0)
    if any(isinstance(value, dict) for value in settings.values()):
        raise keys.error(
            name, f"settings per kind of layer are not part of the {keys.text('model_type')} family"
        )
    return parse_rope(keys, name, settings, head_dim=head_dim, aliases=aliases or {}, partial=partial)


def read_rope_per_layer_type(
    keys: Keys, *, head_dim: int, global_theta: float, local_theta: float
) -> dict[str, RopeConfig]:
    """The ropes of a family whose kinds of layers have their own; `rope_scaling` is the full layers'."""
    nested = _settings(keys, "rope_parameters", keys.get("rope_parameters"))
    layer_types = ("full_attention", "sliding_attention")
    if not set(nested) <= set(layer_types):
        raise keys.error("rope_parameters", f"expected an object for each of {' and '.join(layer_types)}")
    full = _settings(keys, "rope_parameters", nested.get("full_attention"))
    full.update(_settings(keys, "rope_scaling", keys.get("rope_scaling")))
    _fill(full, "rope_theta", keys.get("rope_theta"), global_theta)
    sliding = _settings(keys, "rope_parameters", nested.get("sliding_attention"))
    _fill(sliding, "rope_theta", keys.get("rope_local_base_freq"), local_theta)
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


def _fill(settings: dict[str, Any], key: str, *candidates: Any) -> None:
    """The first value that is not null, unless the settings have one themselves."""
    values = (settings.get(key), *candidates)
    settings[key] = next((value for value in values if value is not None), None)


def parse_rope(
    keys: Keys,
    name: str,
    settings: dict[str, Any],
    *,
    head_dim: int,
    aliases: Mapping[str, str] | None = None,
    partial: bool = False,
) -> RopeConfig:
    """One settings object (with rope_theta filled in) as a RopeConfig."""
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = (aliases or {}).get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_KINDS:
        raise keys.error(name, f"rope type {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})")
    inner = Keys(settings, {}, f"{keys.where}: {name}")
    theta = inner.number("rope_theta")
    if theta <= 1:
        raise inner.error("rope_theta", f"must be above 1, found {theta}")
    partial_factor = inner.optional_number("partial_rotary_factor") or 1.0
    if partial_factor != 1.0 and not partial:
        raise keys.error("partial_rotary_factor", f"only 1.0 is part of this family, found {partial_factor}")
    rotary_dim = int(head_dim * partial_factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise keys.error(name, f"rope needs an even number of rotated dimensions, found {rotary_dim}")
    base = RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if kind == "default":
        return base
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim, factor=inner.number("factor"))

    # A top-level key wins over the one inside, as in transformers (Phi-3 keeps it there).
    max_len = keys.integer("max_position_embeddings")
    original_len = (
        keys.optional_integer("original_max_position_embeddings")
        or inner.optional_integer("original_max_position_embeddings")
        or max_len
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
    """Attention is sharpened with the stretch: 0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4)."""

    def mscale(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = inner.get("mscale"), inner.get("mscale_all_dim")
    if over and under:
        return mscale(inner.number("mscale")) / mscale(inner.number("mscale_all_dim"))
    return mscale(1.0)
