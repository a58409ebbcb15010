"""The keys that recipes add, and the names of sources in metrics."""

import string

import pytest

from lptune.base.errors import UserError
from lptune.config import DataConfig, ModelConfig, PretrainConfig, SourceConfig


def pretrain(*sources: str | SourceConfig, **keys: object) -> PretrainConfig:
    values = {"model": ModelConfig(path="a"), "data": DataConfig(source=sources, seq_len=64), **keys}
    return PretrainConfig(**values)  # type: ignore[arg-type]


def test_num_tokens_becomes_whole_steps_and_the_last_one_is_not_cut() -> None:
    for num_tokens, num_steps in ((1, 1), (512, 1), (513, 2), (5120, 10)):
        cfg = pretrain("a.txt", num_tokens=num_tokens, global_batch_size=8)
        assert cfg.given_num_steps == num_steps
        assert cfg.tokens_per_step == 512
    assert pretrain("a.txt").given_num_steps is None
    assert pretrain("a.txt", num_steps=7).given_num_steps == 7
    with pytest.raises(UserError, match="both set the length of the run; set one of them to null"):
        pretrain("a.txt", num_tokens=5, num_steps=5)


def test_names_of_sources_are_safe_unique_and_readable() -> None:
    sources: list[str | SourceConfig] = [
        "/data/wiki.jsonl", "more/wiki.txt", "shards/*.parquet", "org/some-data:en.v2", "a b/ö&.jsonl",
        "builtin", SourceConfig(source="x.txt", name="wiki-2"), SourceConfig(source="y.txt", name="wiki"),
        "**", "v1.5/", "x" * 200,
    ]  # fmt: skip
    names = pretrain(*sources).source_names
    assert names == (
        "wiki-3", "wiki-4", "shards", "some-data_en.v2", "source", "builtin", "wiki-2", "wiki", "source-2",
        "v1.5", "x" * 40,
    )  # fmt: skip
    assert all(set(name) <= set(string.ascii_letters + string.digits + "._-") for name in names)
    assert len(set(names)) == len(names)
    assert pretrain("a.txt", "b.txt").held_out_names == ("a", "b")


def test_a_name_that_metrics_cannot_have_is_one_line() -> None:
    for name in ("", "a/b", "ö", "x" * 41, "a b"):
        with pytest.raises(UserError, match=r"data\.source\[0\]\.name: must be at most 40 letters"):
            pretrain(SourceConfig(source="a.txt", name=name))
    with pytest.raises(UserError, match="two entries have the name 'a'"):
        pretrain(SourceConfig(source="a.txt", name="a"), SourceConfig(source="b.txt", name="a"))
