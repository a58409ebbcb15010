"""Every YAML of configs/: it loads, it is short, and the commands in its first comment are right."""

import itertools
import re
import shlex
import typing
from pathlib import Path

import pytest
import yaml

from lptune.base.errors import UserError
from lptune.cli import catalog, planned_model, recipe
from lptune.config import (
    EvaluateConfig,
    FinetuneConfig,
    GenerateConfig,
    PrecomputeConfig,
    RunConfig,
    load_config,
)
from lptune.hardware.devices import named_device
from lptune.models import preset_names
from lptune.plan.dry_run import dry_run
from tests.helpers.each import holds_for_each
from tests.helpers.slow import slow_but

CONFIGS = catalog.configs()
RECIPES = {name: catalog.recipe_of(path) for name, path in CONFIGS.items()}
ROOT = Path(__file__).parents[2]
OF_MEMORY = {name for name in CONFIGS if re.search(r"_\d+gb$", name)}
"""FAMILY/SIZE_MEMORY, for one GPU: `llama3_2/3b_48gb`."""
SIZES = {name for name in CONFIGS if "/" in name and RECIPES[name] == "full_finetune"} - OF_MEMORY
"""FAMILY/SIZE: `llama3_2/1b`."""
OF_RECIPES = {name for name in CONFIGS if RECIPES[name] != "full_finetune" and "/" in name}
"""FAMILY/SIZE_SUFFIX of another recipe: `llama3_2/1b_distill`."""
SHOWN = {
    ("quickstart", "schedule.kind"),
    ("quickstart", "eval_every_steps"),
}  # defaults that stand in a file for the reader's sake


def flat(values: dict[str, typing.Any], prefix: str = "") -> dict[str, typing.Any]:
    found: dict[str, typing.Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def commands(text: str) -> list[list[str]]:
    """The `lptune …` lines of the first comment, split as a shell does."""
    comment = "\n".join(line[1:] for line in text.split("\n\n")[0].splitlines()).replace("\\\n", " ")
    return [
        shlex.split(line, comments=True)
        for line in comment.splitlines()
        if line.strip().startswith("lptune ")
    ]


def test_every_yaml_is_found() -> None:
    assert set(CONFIGS.values()) == set((ROOT / "configs").rglob("*.y*ml"))


def load(name: str, *overrides: str) -> typing.Any:
    """As its recipe loads it. A model's config says nothing of data."""
    of_data = ["data.source=x"] if name in SIZES | OF_MEMORY | OF_RECIPES else []
    cfg = load_config(_class(name), CONFIGS[name], [*of_data, *overrides])
    assert isinstance(cfg, RunConfig | GenerateConfig | EvaluateConfig)
    return cfg


def _class(name: str) -> type[typing.Any]:
    return recipe.config_class(catalog.find_recipe(RECIPES[name]))


def test_a_model_config_without_data_is_one_line() -> None:
    def check(name: str) -> None:
        with pytest.raises(
            UserError, match=r"data: is required; set it in the file or as an argument data\.source="
        ):
            load_config(FinetuneConfig, CONFIGS[name])

    holds_for_each(SIZES, check)


def test_each_loads_and_holds_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    holds_for_each(CONFIGS, lambda name: check_values(name, tmp_path / "bare.yaml"))


def check_values(name: str, bare: Path) -> None:
    cfg = load(name)
    of_teacher = "teacher: {path: x}\n" if hasattr(cfg, "teacher") else ""
    of_data = "data: {source: x}\n" if hasattr(cfg, "data") else ""
    bare.write_text(f"model: {{path: x}}\n{of_data}{of_teacher}")
    default = load_config(_class(name), bare)
    for key in flat(yaml.safe_load(CONFIGS[name].read_text())):
        values = [cfg, default]
        for part in key.split("."):
            values = [getattr(value, part) for value in values]
        assert values[0] != values[1] or (name, key) in SHOWN, f"{key}: {values[0]} is the default"
    assert cfg.precision.kind == "none" or name not in SIZES | OF_MEMORY | OF_RECIPES, (
        "precision is chosen on the command line"
    )


def test_each_name_is_a_preset_and_gives_the_output_folder() -> None:
    def check(name: str) -> None:
        family, size = name.split("/")
        assert (name in preset_names()) == (name in SIZES)
        assert f"{family}/{size.partition('_')[0]}" in preset_names()
        assert load(name).output_dir == f"runs/{family}-{size}-none"

    holds_for_each(SIZES | OF_MEMORY, check)


def test_each_first_comment_downloads_what_the_config_reads_and_runs_it() -> None:
    holds_for_each(SIZES | OF_MEMORY, check_comment)


def check_comment(name: str) -> None:
    text = CONFIGS[name].read_text()
    download, *runs = commands(text)
    assert download[:2] == ["lptune", "download"]
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", download[2])
    assert load(name).model.path == f"checkpoints/{download[2].split('/')[1]}"
    kinds, folders = [], set()
    for run in runs:
        place = run.index("full_finetune")
        assert run[:2] == ["lptune", "run"]
        assert run[place + 1 : place + 3] == ["--config", name]
        flags = run[2:place]
        assert set(flags[::2]) <= {"--nproc-per-node", "--nnodes", "--rdzv-endpoint"}
        cfg = load_config(FinetuneConfig, CONFIGS[name], run[place + 3 :])
        assert cfg.data.source == "rows.jsonl"
        kinds.append(cfg.precision.kind)
        folders.add(cfg.output_dir)
        options = dict(zip(flags[::2], flags[1::2], strict=True))
        ranks = int(options.get("--nnodes", 1)) * int(options.get("--nproc-per-node", 1))
        assert cfg.global_batch_size % (cfg.micro_batch_size * ranks) == 0
    assert kinds == ["none", "int8_rotated", "float8_rowwise"]
    assert len(folders) == len(kinds), "a second command would find the first one's run"


def test_the_configs_of_other_recipes_name_their_model_and_download_what_they_read() -> None:
    holds_for_each(OF_RECIPES, check_comment_of_another_recipe)


def check_comment_of_another_recipe(name: str) -> None:
    family, size = name.split("/")
    assert f"{family}/{size.partition('_')[0]}" in preset_names()
    assert load(name).output_dir == f"runs/{family}-{size}-none"
    found = commands(CONFIGS[name].read_text())
    downloads = {f"checkpoints/{line[2].split('/')[1]}" for line in found if line[1] == "download"}
    paths = flat(yaml.safe_load(CONFIGS[name].read_text()))
    assert downloads == {paths[key] for key in ("model.path", "teacher.path") if key in paths}
    runs = [line for line in found if line[1] == "run"]
    if "logits.folder" in paths:
        before = runs.pop()
        assert before == ["lptune", "run", "precompute_logits", *runs[0][3:]]
        assert not load_config(PrecomputeConfig, CONFIGS[name], before[5:]).precision.needs_float8
    for run in runs:
        assert run[2:5] == [RECIPES[name], "--config", name]
    cfgs = [load_config(_class(name), CONFIGS[name], run[5:]) for run in runs]
    assert [cfg.precision.kind for cfg in cfgs] == ["none", "int8_rotated", "float8_rowwise"]
    assert len({cfg.output_dir for cfg in cfgs}) == len(cfgs)


def test_the_configs_for_pretraining_are_planned_for_their_preset_and_fit_their_schedule() -> None:
    def check(name: str) -> None:
        cfg = load(name)
        assert cfg.given_num_steps == 1908
        _, model, _ = planned_model.of_config(cfg, CONFIGS[name], None)
        assert model == f"the preset {name.removesuffix('_pretrain')}"

    holds_for_each((name for name in CONFIGS if RECIPES[name] == "continued_pretrain"), check)


# Ten seconds each: the smaller of the two closest to their limit, with the kind that the configs name.
@pytest.mark.parametrize(
    ("name", "kind"),
    slow_but(
        lambda name, kind: name == "llama3_1/8b_48gb" and kind == "int8_rotated",
        itertools.product(sorted(OF_MEMORY), ("none", "int8_rotated")),
    ),
)
def test_the_configs_for_one_gpu_are_planned_to_leave_a_tenth_of_it_free(name: str, kind: str) -> None:
    memory_gb = int(re.search(r"_(\d+)gb$", name)[1])  # type: ignore[index]
    cfg = load(name, f"precision.kind={kind}")
    model_config, model, _ = planned_model.of_config(cfg, CONFIGS[name], None)
    assert model == f"the preset {name.rpartition('_')[0]}"
    device = named_device({16: "4080", 24: "4090", 48: "l40s", 80: "h100"}[memory_gb])
    assert device.memory_bytes == memory_gb * 10**9
    peak_bytes = dry_run(cfg, model_config, 1, device).peak_bytes
    assert peak_bytes <= 0.9 * device.memory_bytes, f"{peak_bytes:,}"


def test_make_quickstart_runs_the_commands_of_its_config() -> None:
    makefile = (ROOT / "Makefile").read_text()
    new_checkpoint, run = commands(CONFIGS["quickstart"].read_text())
    for command in (new_checkpoint, run):
        assert f"$(BIN)/{' '.join(command)}\n" in makefile
    assert new_checkpoint[2] in preset_names()
    assert new_checkpoint[3] == load_config(FinetuneConfig, CONFIGS["quickstart"]).model.path


def test_the_memory_in_the_first_comment_is_16_bytes_per_parameter() -> None:
    from lptune.models import build_on_meta, facts_of_preset, num_parameters

    names = ("llama3_2/1b", "phi4/14b", "gemma2/9b", "gemma3/270m", "qwen3/4b", "qwen2_5/32b", "glm4_moe/air")
    for name in names:
        model = build_on_meta(facts_of_preset(name))
        assert f"take {16 * num_parameters(model) / 1e9:.0f} GB" in CONFIGS[name].read_text()
