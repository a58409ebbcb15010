"""Tasks of lm_eval through `lptune run evaluate`, against lm_eval's own model `hf`, number for number.

Skipped where lm_eval is not installed. tests/inference/test_score.py tests the scores without it.
"""

import importlib.util
import json
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lptune.base.errors import UserError
from tests.helpers import cold, warm
from tests.helpers.cold import Finished
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_recipe import make_checkpoint

if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm_eval is not installed: the extra `eval`", allow_module_level=True)

WORDS = [
    "Once", "upon", "a", "time", "there", "was", "a", "little", "girl", "who", "liked", "to", "play", "with",
    "her", "dog", "in", "the", "park",
]  # fmt: skip
TASKS = {
    "mc": """
        fewshot_split: test
        output_type: multiple_choice
        doc_to_text: "{{question}}.\\nAnswer:"
        doc_to_choice: "{{choices}}"
        doc_to_target: gold
        metric_list:
          - {metric: acc, aggregation: mean, higher_is_better: true}
          - {metric: acc_norm, aggregation: mean, higher_is_better: true}
        """,
    "rolling": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
        """,
    "gen": """
        output_type: generate_until
        doc_to_text: "{{prompt}}"
        doc_to_target: "{{answer}}"
        generation_kwargs: {until: [". ", "the"], max_gen_toks: 20}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
        """,
}
HF = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
manager = TaskManager(include_path=sys.argv[1], include_defaults=False)
found = {}
for name, case in json.loads(sys.argv[2]).items():
    done = lm_eval.simple_evaluate(model="hf", task_manager=manager, device="cpu", batch_size=3,
                                   bootstrap_iters=1000, log_samples=True, **case)
    found[name] = {key: done[key] for key in ("results", "samples")}
with open(sys.argv[3], "w") as file:
    json.dump(found, file, default=str)
"""


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint and a folder of toy tasks."""
    folder = tmp_path_factory.mktemp("harness")
    make_checkpoint(folder / "tiny")
    draw = random.Random(0)

    def text(*numbers: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.choice(numbers)))

    write_rows(
        folder / "mc.jsonl",
        [
            {"question": text(3, 9, 40), "choices": [text(1, 2, 4) for _ in range(4)], "gold": number % 4}
            for number in range(11)
        ],
    )
    # Choices of one letter: they differ in their last token alone, and share one row.
    write_rows(
        folder / "letters.jsonl",
        [{"question": text(5, 8), "choices": list("ABCD"), "gold": number % 4} for number in range(4)],
    )
    write_rows(folder / "rolling.jsonl", [{"text": text(3, 20, 150)} for _ in range(4)])
    write_rows(folder / "gen.jsonl", [{"prompt": text(2, 7, 50), "answer": "x"} for _ in range(5)])
    (folder / "tasks").mkdir()
    for name, lines in {**TASKS, "letters": TASKS["mc"]}.items():
        head = f"task: toy_{name}\ndataset_path: json\ntest_split: test\nmetadata: {{version: 1.0}}\n"
        files = f"dataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}\n"
        body = "".join(f"{line[8:]}\n" for line in lines.splitlines())
        (folder / "tasks" / f"{name}.yaml").write_text(head + files + body, encoding="utf-8")
    return folder


def environment(folder: Path) -> dict[str, str]:
    """lm_eval where this process finds it, and data sets in a folder of their own."""
    import lm_eval

    paths = [str(cold.ROOT), str(Path(lm_eval.__file__).parents[1])]
    return {"PYTHONPATH": os.pathsep.join(paths), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({}, []),
    # 48 tokens: contexts lose their beginning, texts are scored in windows, prompts leave room for answers.
    "short": ({"num_fewshot": 2, "max_length": 48}, ["harness.num_fewshot=2", "harness.max_length=48"]),
    "chat": ({"apply_chat_template": True, "num_fewshot": 1}, ["harness.chat=true", "harness.num_fewshot=1"]),
}
ALL = ("toy_mc", "toy_letters", "toy_rolling", "toy_gen")
OF_CASE = {"chat": ("toy_mc", "toy_letters", "toy_gen")}


def run_hf(folder: Path, model: Path, cases: list[str], into: str) -> dict[str, Any]:
    arguments = {}
    for name in cases:
        options = dict(CASES[name][0])
        model_args = {"pretrained": str(model), "dtype": "float32"}
        if "max_length" in options:
            model_args["max_length"] = options.pop("max_length")
        arguments[name] = {"model_args": model_args, "tasks": list(OF_CASE.get(name, ALL)), **options}
    script = ("-c", HF, str(folder / "tasks"), json.dumps(arguments), into)
    done = cold.run(*script, folder=folder, **environment(folder))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / into).read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def by_hf(folder: Path) -> dict[str, Any]:
    return run_hf(folder, folder / "tiny", list(CASES), "hf.json")


def evaluate(folder: Path, model: Path, tmp_path: Path, *keys: str, ranks: int = 1) -> Finished:
    fixed = [f"model.path={model}", "compute_dtype=float32", "device=cpu", "batch_size=3"]
    fixed += [f"harness.task_folder={folder / 'tasks'}", "harness.run_task_code=true"]
    arguments = ["run", "evaluate", "--config", "evaluation", *fixed, *keys]
    return warm.lptune(arguments, folder=tmp_path, environment=environment(folder), ranks=ranks)


def check_equal(tmp_path: Path, hf: dict[str, Any]) -> None:
    """Metrics and every answer of our result against those of `hf`."""
    ours = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))["harness"]
    assert ours["results"].keys() == hf["results"].keys()
    for task, metrics in hf["results"].items():
        for key, value in metrics.items():
            # A log-probability of float32 is right to about 1e-6. A perplexity is exp of a mean of at most 50
            # nats a word, so 1e-4 is right for it.
            is_perplexity = key.startswith("word_perplexity,")
            wanted = pytest.approx(value, rel=1e-4) if is_perplexity else value
            assert ours["results"][task][key] == wanted, (task, key)
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples: dict[str, list[dict[str, Any]]] = {}
    for sample in map(json.loads, lines):
        samples.setdefault(sample["task"], []).append(sample)
    for task, wanted in hf["samples"].items():
        for ours_of, theirs in zip(samples[task], wanted, strict=True):
            assert ours_of["doc"] == theirs["doc"]
            for found, expected in zip(ours_of["resps"], theirs["resps"], strict=True):
                if task == "toy_gen":
                    assert found == expected
                elif task == "toy_rolling":
                    assert found[0] == pytest.approx(expected[0], rel=1e-5)
                else:
                    assert found[0][0] == pytest.approx(expected[0][0], rel=1e-5)
                    assert found[0][1] == expected[0][1]


@pytest.mark.parametrize(("case", "ranks"), [("plain", 1), ("short", 1), ("chat", 1), ("plain", 2)])
def test_results_and_answers_are_those_of_hf(
    folder: Path, by_hf: dict[str, Any], tmp_path: Path, case: str, ranks: int
) -> None:
    tasks = ",".join(OF_CASE.get(case, ALL))
    keys = (f"harness.tasks=[{tasks}]", "harness.output=samples.jsonl", *CASES[case][1])
    done = evaluate(folder, folder / "tiny", tmp_path, *keys, ranks=ranks)
    assert done.returncode == 0, done.stderr
    check_equal(tmp_path, by_hf[case])
    written = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert written["num_ranks"] == ranks
    assert written["harness"]["versions"].keys() == {"lm_eval"}
    assert written["harness"]["seeds"]["fewshot"] == 1234
    assert "toy_mc: acc (none) 0." in done.stdout


def test_a_trained_model_gets_the_results_of_hf(assets: Path, folder: Path, tmp_path: Path) -> None:
    model = assets / "models/story_llama"
    hf = run_hf(folder, model, ["plain"], "story.json")["plain"]
    keys = (f"harness.tasks=[{','.join(ALL)}]", "harness.output=samples.jsonl")
    done = evaluate(folder, model, tmp_path, *keys)
    assert done.returncode == 0, done.stderr
    check_equal(tmp_path, hf)
    said = [sample["resps"] for sample in hf["samples"]["toy_gen"]]
    assert any(text for ((text,),) in said), "the trained model says something"


def test_an_8_bit_kind_gives_other_scores(folder: Path, by_hf: dict[str, Any], tmp_path: Path) -> None:
    keys = ("harness.tasks=[toy_rolling]", "harness.output=samples.jsonl", "precision.kind=int8_rowcol")
    done = evaluate(folder, folder / "tiny", tmp_path, *keys)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()[0])["resps"][0][
        0
    ]
    exact = by_hf["plain"]["samples"]["toy_rolling"][0]["resps"][0][0]
    assert found != pytest.approx(exact, rel=1e-6)
    assert found == pytest.approx(exact, rel=0.02)


PLAIN = "task: bad\ndataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\n"
ROLLING = "output_type: loglikelihood_rolling\ndoc_to_text: ''\n"


@pytest.mark.parametrize(
    ("yaml", "keys", "message"),
    [
        ("", ["harness.tasks=[toy_mx]"], "lm_eval has no task 'toy_mx' (did you mean 'toy_mc'?)"),
        ("", ["harness.tasks=[toy_mc]", "harness.task_folder=nowhere"], "nowhere is not a folder"),
        (PLAIN, ["harness.tasks=[bad]", "harness.run_task_code=false"], "tasks: files of tasks can run code"),
        (PLAIN + ROLLING + 'doc_to_target: "{{ txt }}"\n', [], "UndefinedError: 'txt' is undefined"),
        (PLAIN.replace("rows.jsonl", "no.jsonl") + ROLLING, [], "a task cannot be read: FileNotFoundError"),
    ],
)  # fmt: skip
def test_wrong_input_gets_one_line(
    folder: Path, tmp_path: Path, yaml: str, keys: list[str], message: str
) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": "a text"}])
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/bad.yaml").write_text(yaml or "task: good\n", encoding="utf-8")
    given = keys or ["harness.tasks=[bad]", f"harness.task_folder={tmp_path / 'tasks'}"]
    done = evaluate(folder, folder / "tiny", tmp_path, *given)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "evaluation.json").exists()


def test_a_metric_of_the_hub_is_refused_before_its_code_runs(folder: Path, tmp_path: Path) -> None:
    # `evaluate` would run this file, and this task of lm_eval would then run what the model writes.
    (tmp_path / "code_eval").mkdir()
    (tmp_path / "code_eval/code_eval.py").write_text("open('ran', 'w').close()\n", encoding="utf-8")
    untrusted = ("harness.task_folder=null", "harness.run_task_code=false")
    done = evaluate(folder, folder / "tiny", tmp_path, "harness.tasks=[humaneval]", *untrusted)
    assert done.returncode == 2, done.stderr
    assert "runs the metric 'code_eval', which is code of the hub" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("**/ran"))


def test_sampled_answers_are_those_of_one_rank_on_two(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": f"The {number}"} for number in range(5)])
    (tmp_path / "tasks").mkdir()
    sampled = "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: x\n"
    options = "generation_kwargs: {until: ['.'], max_new_tokens: 6, do_sample: true, temperature: 1.0}\n"
    (tmp_path / "tasks/bad.yaml").write_text(PLAIN + sampled + options, encoding="utf-8")
    beams = options.replace("temperature: 1.0", "num_beams: 4")
    (tmp_path / "tasks/beams.yaml").write_text(
        PLAIN.replace("bad", "beams") + sampled + beams, encoding="utf-8"
    )
    files, own = {}, f"harness.task_folder={tmp_path / 'tasks'}"
    for ranks in (1, 2):
        keys = ("harness.tasks=[bad]", own, f"harness.output={ranks}.jsonl", f"output={ranks}.json")
        done = evaluate(folder, folder / "tiny", tmp_path, *keys, ranks=ranks)
        assert done.returncode == 0, done.stderr
        files[ranks] = (tmp_path / f"{ranks}.jsonl").read_bytes()
    assert files[1] == files[2]
    assert len({str(json.loads(line)["resps"]) for line in files[1].splitlines()}) == 5
    done = evaluate(folder, folder / "tiny", tmp_path, "harness.tasks=[beams]", own)
    assert done.returncode == 2
    assert "a task sets 'num_beams' for its answers, which lptune does not have" in done.stderr


def ask_differently(rank: int, size: int, folder: Path) -> str:
    from lptune import distributed
    from lptune.config import EvaluateConfig, HarnessConfig, ModelConfig, PrecisionConfig
    from lptune.inference import load_model
    from lptune.inference.harness import HarnessModel

    cfg = EvaluateConfig(model=ModelConfig(path=str(folder)), harness=HarnessConfig(tasks=("x",)))
    with distributed.session("cpu") as world:
        loaded = load_model(str(folder), PrecisionConfig(), "float32", world, num_tokens=8)
        model = HarnessModel(loaded, cfg, world)
        with pytest.raises(UserError) as raised:
            model.loglikelihood([SimpleNamespace(args=("Once", f" {rank}"))])
        return str(raised.value)


def test_ranks_that_would_answer_other_requests_say_so(folder: Path) -> None:
    lines = run_ranks(2, ask_differently, folder / "tiny")
    assert all("a task makes other requests on each rank" in line for line in lines)


def test_a_trusted_folder_may_run_its_functions(folder: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"text": "a text"}])
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/own.py").write_text("def target(doc):\n    return doc['text'] * 2\n", encoding="utf-8")
    (tmp_path / "tasks/bad.yaml").write_text(
        PLAIN + ROLLING + "doc_to_target: !function own.target\n", encoding="utf-8"
    )
    keys = ("harness.tasks=[bad]", f"harness.task_folder={tmp_path / 'tasks'}")
    done = evaluate(folder, folder / "tiny", tmp_path, *keys)
    assert done.returncode == 0, done.stderr
    assert "bad: word_perplexity (none)" in done.stdout
