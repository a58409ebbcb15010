"""Every causal model type of transformers that our own decoder does not build: loaded by lptune's names map,
with packed documents, against transformers' own eager attention on each document alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lptune import checkpoint, linear, models
from lptune.base.errors import UserError
from lptune.config import DataConfig, FinetuneConfig, ModelConfig, load_config
from lptune.linear.verify import verify_step
from lptune.models.hf import attention, check, mixers
from lptune.plan.dry_run import dry_run
from tests.helpers import hf_types
from tests.helpers.packed import LENGTHS, SEQ_LEN, alone, bounds, loaded
from tests.helpers.slow import slow_but
from tests.helpers.tiny_recipe import write_config


@pytest.mark.parametrize("kind", hf_types.TYPES)
def test_packed_documents_have_the_logits_that_transformers_gives_each_alone(
    kind: str, tmp_path: Path
) -> None:
    reference = hf_types.causal(kind)
    reference.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    model.facts.check()
    tokens_BS = torch.randint(3, 256, (len(LENGTHS), SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = alone(reference, tokens_BS)
        found = model(tokens_BS, bounds())
    # Float32: 4 blocks of at most 128 products in a row, whose order differs.
    assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())
    # And it trains: three GEMMs in 8 bits in each converted layer, a gradient in each parameter that has one.
    plan = linear.convert(model, "int8_rowcol")
    left = {layer.reason for layer in plan.layers if layer.spec is None}
    odd, router = "sizes are not multiples of 16", "a subclass of nn.Linear: "
    assert left <= {"precision.skip: lm_head", odd, f"{router}Router", f"{router}Llama4Router"}
    with verify_step(model, plan, 1) as verified:
        loss = model(tokens_BS, bounds(), tokens_BS)
        loss.backward()
    assert verified.num_gemms >= 3 * len(plan.converted)
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and "moe_statics" not in name:  # which transformers does not train either
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize(
    "kind", slow_but(lambda kind: kind == "falcon_h1", ["lfm2_moe", "nemotron_h", "falcon_h1"])
)
def test_a_recurrent_model_is_planned(kind: str, tmp_path: Path) -> None:
    """A dry run has no documents to count. Blocks of falcon_h1 return a tuple."""
    hf_types.config(kind).save_pretrained(tmp_path)
    config = write_config(tmp_path / "c.yaml", tmp_path, tmp_path / "run")
    cfg = load_config(
        FinetuneConfig, config, ["data.seq_len=32", "precision.kind=int8_rowcol", "global_batch_size=4"]
    )
    facts = models.read_config(tmp_path)
    found = dry_run(cfg, facts, world_size=2)
    assert found.num_parameters == models.num_parameters(models.build_on_meta(facts))
    assert found.peak_bytes > 16 * found.num_parameters / 2


def test_experts_are_converted_and_the_router_is_not(tmp_path: Path) -> None:
    hf_types.config("afmoe").save_pretrained(tmp_path)
    model = models.build_on_meta(models.read_config(tmp_path))
    plan = linear.convert(model, "int8_rotated")
    shapes = {layer.name: layer.columns()[0] for layer in plan.converted}
    assert shapes["model.layers.3.mlp.experts.gate_up_proj"] == "8 x 64 x 64"
    routers = [layer.name for layer in plan.layers if str(layer.reason).endswith("Router")]
    assert routers == [f"model.layers.{number}.mlp.router.gate" for number in (1, 2, 3)]
    # A token uses two of eight experts.
    experts = [layer for layer in plan.converted if layer.num_groups]
    assert all(layer.flops_per_gemm == 2 * layer.in_features * layer.out_features / 4 for layer in experts)


@pytest.mark.parametrize(
    "kind",
    [
        *("cohere2", "gpt_oss", "deepseek_v3", "gemma4_text", "llama4_text", "diffllama"),
        *("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5_text"),
    ],
)
def test_a_cache_gives_the_logits_of_whole_rows(kind: str, tmp_path: Path) -> None:
    """Rows of other and of equal lengths, beyond the windows and chunks of 16; keys and values of other
    sizes; sinks; states of convolutions, Mamba and delta nets.
    """
    hf_types.causal(kind).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    if kind == "nemotron_h":
        # transformers has a least time step (0.001) where it reads many tokens, and none where it reads one.
        for name, parameter in model.named_parameters():
            if name.endswith("dt_bias"):
                parameter.data.fill_(1.0)
    cache = model.make_cache(3, 40)
    assert cache is not None
    rows = torch.randint(3, 256, (3, 30), generator=torch.Generator().manual_seed(1)).tolist()
    lengths = [19, 7, 19]
    with torch.no_grad():
        for new in range(6):
            now = [row[: length + new] for row, length in zip(rows, lengths, strict=True)]
            fed = [row[-1:] for row in now] if new else now
            longest = max(map(len, fed))
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in fed])
            found = model.next_logits(padded, torch.tensor([len(row) for row in fed]), cache)
            for row, logits in zip(now, found, strict=True):
                expected = model(torch.tensor([row]))[0, -1]
                assert float((logits - expected).abs().max()) < 2e-5 * float(expected.abs().max())


def test_llama_4_has_no_cache_where_it_would_scale_queries_by_places_from_0(tmp_path: Path) -> None:
    hf_types.config("llama4_text", floor_scale=64).save_pretrained(tmp_path)
    model = models.build_on_meta(models.read_config(tmp_path)).to_empty(device="cpu")
    assert model.make_cache(1, 64) is not None
    assert model.make_cache(1, 65) is None


def test_a_cache_that_is_not_exact_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows are slow and right. A window is left out here, which only the small twin can tell."""
    hf_types.causal("cohere2").save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert model.make_cache(1, 4) is not None
    real = attention.PastTokens.mask
    monkeypatch.setattr(attention.PastTokens, "mask", lambda self, _: real(self, lambda *at: at[3] <= at[2]))
    check.caches_exactly.cache_clear()
    assert model.make_cache(1, 4) is None
    check.caches_exactly.cache_clear()


@pytest.mark.parametrize(
    ("kind", "part"), [("gemma3", "gemma3_text"), ("qwen3_5", "qwen3_5_text"), ("mistral3", "ministral3")]
)
def test_the_text_part_of_a_model_that_sees_is_trained_and_the_rest_passes_on(
    kind: str, part: str, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = hf_types.config(part).to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    if kind == "mistral3":
        vision |= {"model_type": "pixtral", "head_dim": 16}
    whole = AutoConfig.for_model(kind, text_config=text, vision_config=vision)
    reference = AutoModelForImageTextToText.from_config(whole).float().eval()
    hf_types.fill(reference)
    reference.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    tokens_BS = torch.randint(3, 256, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(input_ids=tokens_BS, use_cache=False).logits
        found = model(tokens_BS)
    assert float((found - expected).abs().max()) < 2e-5 * float(expected.abs().max())
    stored = models.read_index(tmp_path).tensors
    passed = [name for name in stored if model.passes_on(name)]
    assert passed
    assert all("language_model" not in name for name in passed)
    assert isinstance(model, models.Decoder) == (part in models.FAMILIES)
    # The other of the two layouts in which folders are published.
    tensors = load_file(tmp_path / "model.safetensors")
    names = ["language_model.model.", "model.language_model."]
    one, other = names if any(name.startswith(names[0]) for name in tensors) else names[::-1]
    renamed = {name.replace(one, other): each for name, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    again = loaded(tmp_path)
    assert type(again) is type(model)
    with torch.no_grad():
        assert torch.equal(again(tokens_BS), found)


def test_a_text_part_with_a_setting_that_is_not_ours_is_built_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = hf_types.config("gemma3_text").to_dict() | {"attn_logit_softcapping": 50.0}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    AutoModelForImageTextToText.from_config(whole).save_pretrained(tmp_path)
    assert not isinstance(models.read_config(tmp_path), models.DecoderConfig)


def test_the_attention_is_chosen_by_the_hidden_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP shards weights in float32, and gathers them in bfloat16 after the masks are made."""
    hf_types.config("cohere2").save_pretrained(tmp_path)
    model = models.build_on_meta(models.read_config(tmp_path)).to_empty(device="cpu")
    model.reset_buffers("cpu")
    model.init_weights(0)
    found = []
    real = attention.make_visibility
    monkeypatch.setattr(
        attention, "make_visibility", lambda name, *rest: found.append(name) or real(name, *rest)
    )
    with torch.autocast("cpu", torch.bfloat16):
        tokens = torch.ones(2, SEQ_LEN, dtype=torch.int64)
        model.embedding.register_forward_hook(lambda *args: args[-1].bfloat16())
        model(tokens, bounds())
    assert set(found) == {"documents"}
    assert model.attention_backend(torch.device("cpu"), torch.float32, seq_len=SEQ_LEN) == "sdpa"


@pytest.mark.parametrize("fault", ["mask", "mixer", "window"])
def test_a_model_whose_documents_leak_is_refused(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_types.causal("lfm2" if fault == "mixer" else "cohere2").save_pretrained(tmp_path)
    facts = models.read_config(tmp_path)
    facts.check()
    if fault == "mask":
        real = attention.make_visibility
        monkeypatch.setattr(
            attention, "make_visibility", lambda name, documents, *rest: real(name, None, *rest)
        )
    elif fault == "window":
        monkeypatch.setattr(attention, "_window", lambda rule, seq_len: (None, True))
    else:
        monkeypatch.setattr(mixers, "find", lambda model: [])
    with pytest.raises(UserError, match="documents of a packed row apart"):
        facts.check()


def test_what_cannot_be_built_is_refused_in_one_line(tmp_path: Path) -> None:
    def read(**content: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
        models.read_config(tmp_path)

    with pytest.raises(UserError, match=r"'t5' is neither one of llama"):
        read(model_type="t5")
    with pytest.raises(UserError, match=r"quantized .gptq."):
        read(model_type="gpt_oss", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match="ForCausalLM"):
        read(model_type="cohere2", architectures=["Cohere2Model"])
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UserError, match=r"rope_type 'dynamic'"):
        read(**hf_types.config("apertus").to_dict() | {"rope_parameters": rope})
    with pytest.raises(UserError, match="transformers refuses it"):
        read(model_type="cohere2", hidden_size="wide")


def test_a_transformers_that_was_not_tried_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"]}'
    )
    monkeypatch.setattr("transformers.__version__", "5.16.2")
    with pytest.raises(
        UserError, match=r"transformers 5\.17 or newer, found 5\.16\.2; run: .* -U transformers"
    ):
        models.read_config(tmp_path)


def test_a_checkpoint_without_a_constant_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hf_types.causal("minimax_m2").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("e_score_correction_bias"))
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"e_score_correction_bias' is missing"):
        loaded(tmp_path)


def test_a_head_of_another_name_stays_high(tmp_path: Path) -> None:
    hf_types.config("biogpt").save_pretrained(tmp_path)
    plan = linear.convert(models.build_on_meta(models.read_config(tmp_path)), "int8_rowcol")
    reasons = {layer.name: layer.reason for layer in plan.layers if layer.spec is None}
    assert reasons == {"output_projection": "precision.skip: lm_head"}


def test_a_shape_that_config_json_does_not_ask_for_is_named(tmp_path: Path) -> None:
    for kind, key in (("cohere2", "intermediate_size"), ("qwen3_moe", "moe_intermediate_size")):
        folder = tmp_path / kind
        hf_types.causal(kind).save_pretrained(folder)
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {key: 2 * content[key]}))
        with pytest.raises(UserError, match="asks for"):
            checkpoint.read_base(str(folder), print).build_on_meta()


def test_a_head_that_differs_from_the_embedding_is_not_tied(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hf_types.causal("cohere2", tie_word_embeddings=True).save_pretrained(tmp_path)
    assert loaded(tmp_path).facts.tied
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = loaded(tmp_path)
    embedding, head = (model.get_parameter(name) for name in model.facts.word_names)
    assert torch.equal(head, 2 * embedding)


def test_blocks_after_the_last_one_pass_on(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    hf_types.causal("glm4_moe", num_nextn_predict_layers=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.layers.4.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    assert loaded(tmp_path).passes_on("model.layers.4.eh_proj.weight")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (
            "gemma4_text",
            {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
            | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        ),
        ("phimoe", {"num_local_experts": 4}),  # samples experts in training mode
        ("mimo_v2_flash", {"head_dim": 32, "v_head_dim": 16}),  # sinks, and smaller values than keys
        ("bamba", {"attn_layer_indices": [2], "mamba_n_heads": 16, "mamba_d_head": 8}),  # kinds by number
    ],
)
def test_settings_that_differ_between_layers(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    hf_types.causal(kind, **settings).save_pretrained(tmp_path)
    model = loaded(tmp_path).train()
    model.facts.check()
    tokens_BS = torch.randint(3, 256, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(model(tokens_BS), model(tokens_BS))


def test_a_linear_layer_that_is_made_in_float32_stays_so(tmp_path: Path) -> None:
    experts = {"num_experts": 16, "moe_topk": [2] * 4, "moe_intermediate_size": [32] * 4}
    hf_types.causal("hunyuan_v1_moe", **experts, num_shared_expert=[1] * 4).save_pretrained(tmp_path)
    plan = linear.convert(loaded(tmp_path), "int8_rowcol")
    routers = [f"model.layers.{number}.mlp.gate.wg" for number in range(4)]
    assert {layer.name for layer in plan.layers if layer.reason} >= set(routers)


def test_hidden_states_in_float32_are_one_line_in_bfloat16(tmp_path: Path) -> None:
    sizes = {"num_heads": 16, "head_dim": 8, "expand": 2, "n_groups": 1, "state_size": 16}
    hf_types.causal("mamba2", **sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"float32\); set compute_dtype=float32"):
        loaded(tmp_path).float32_names  # noqa: B018


def test_code_that_reads_values_trains_in_bfloat16_and_is_not_planned(tmp_path: Path) -> None:
    hf_types.causal("jetmoe", kv_channels=16, num_local_experts=4, num_experts_per_tok=2).save_pretrained(
        tmp_path
    )
    model = loaded(tmp_path)
    assert not model.float32_names
    data = DataConfig(source="unused", seq_len=32)
    cfg = FinetuneConfig(model=ModelConfig(path="unused"), data=data, micro_batch_size=1, global_batch_size=1)
    with pytest.raises(UserError, match=r"'jetmoe'.*cannot be planned"):
        dry_run(cfg, model.facts, 1)


def test_llama4_scales_attention_by_the_place_in_the_row(tmp_path: Path) -> None:
    hf_types.causal("llama4_text", floor_scale=30, attn_temperature_tuning=True).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    with pytest.raises(UserError, match=r"data\.seq_len.*30 at most"):
        model(torch.ones(2, SEQ_LEN, dtype=torch.int64), bounds())


def test_a_check_without_numbers_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_types.causal("cohere2").save_pretrained(tmp_path)
    facts = models.read_config(tmp_path)
    monkeypatch.setattr(check, "_alone", lambda model, tokens: torch.full((tokens.shape[1], 64), torch.nan))
    with pytest.raises(UserError):
        facts.check()


def test_the_check_looks_at_few_words_and_experts_of_a_large_model(tmp_path: Path) -> None:
    content = hf_types.config("qwen3_moe", vocab_size=150_000, num_experts=64).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    twin = check._twin(models.read_config(tmp_path))
    assert twin.vocab_size == 64
    assert models.num_parameters(models.build_on_meta(twin)) < 1_000_000
