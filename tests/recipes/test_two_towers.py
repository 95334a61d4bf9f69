"""Two towers against plain loops that compute the matrix of all pairs at once, and what is refused."""

import json
import re
import runpy
from functools import cache, partial
from itertools import product

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from torch.nn.functional import cross_entropy, normalize
from transformers import CLIPModel, SiglipModel

import tasks
from chat_templates import word_tokenizer
from jobs import run_job, train_in_job
from largebatch.config import load_config
from largebatch.config.commits import at_commits
from largebatch.data.images import normalize_pixels
from largebatch.errors import DataError
from largebatch.model.building import SeededWeights, build_without_weights
from largebatch.storage.files import read_json_lines
from paths import CLIP_B32, CLIP_DIGITS, EMBED_PYDOC
from pictures import png
from problems import problem_of, problems_of
from reference import global_batches, train_plainly
from small_data import of_file, rows_in
from test_strategies import assert_same, recorded

README = CLIP_DIGITS.with_name("README.md")
STEPS = 4
TINY_TOWER = '{"hidden_size": 16, "num_layers": 1, "num_heads": 2}'
# SGD, because Adam hides a factor that all gradients have.
SGD = (
    '--optimizer={"name": "sgd", "momentum": 0.9, "weight_decay": 0.01}',
    "--learning_rate.warmup=null",
    '--learning_rate.decay={"name": "constant"}',
    "--learning_rate.base_lr=0.05",
    "--learning_rate.scaling=none",
    f"--train.stop_after_steps={STEPS}",
    "--batch.global_batch_size=24",
    "--batch.micro_batch_size=4",
)
CLIP = (
    *SGD,
    f"--model.image={TINY_TOWER}",
    f"--model.text={TINY_TOWER}",
    "--model.features=16",
    "--evaluation.max_samples=30",
)
SIGLIP = (
    *CLIP,
    "--model.architecture=siglip",
    '--loss={"name": "sigmoid", "temperature": 0.1, "learned": true, "bias": -10, "duplicates": "negatives"}',
)
FP64 = "--precision=fp64"


def plain(recipe, words, mean_loss):
    """The same training in plain PyTorch, the whole global batch at once."""
    torch.set_default_dtype(torch.float64 if FP64 in words else torch.float32)
    config = load_config(recipe, words)
    model, draws = build_without_weights(partial(tasks.build_model(recipe), config))
    weights = SeededWeights(model, draws, config.seed)
    drawn = {name: weights.read(name, 0, each.numel()).view(each.shape) for name, each in model.named_parameters()}
    model = tasks.build_model(recipe)(config)
    model.load_state_dict(drawn, strict=False)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    # Matrices and embeddings decay; neither norms and biases, nor the scalars.
    groups = [
        {"params": [each], "weight_decay": 0.01 if each.ndim > 1 or name.endswith("class_embedding") else 0.0}
        for name, each in trained.items()
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9)
    source, _ = tasks.sources("two_towers")(config)
    batches = global_batches(len(source), {0: 24}, not config.batch.drop_last, STEPS)
    upcoming = iter(batches)

    def loss_of(indices):
        epoch, *_ = next(upcoming)
        return mean_loss(config, model, source.fetch(indices, epoch))

    return train_plainly(config, model, optimizer, loss_of, batches, [0.05] * STEPS)


def of_images(config, model, batch):
    """By the forward pass of `transformers` itself, which computes all logits."""
    pixels = normalize_pixels(batch["pixel_values"], config.data, torch.get_default_dtype())
    is_sigmoid = config.loss.name == "sigmoid"
    outputs = type(model).forward(model, batch["input_ids"].squeeze(1), pixels, return_loss=is_sigmoid)
    return outputs.loss if is_sigmoid else softmax_loss(outputs.logits_per_image, batch)


def softmax_loss(logits, batch):
    """Of images with their texts, in both directions; equal texts are not negatives."""
    same = batch["labels"][:, None] == batch["labels"]
    logits = logits.masked_fill(same & ~torch.eye(len(same), dtype=torch.bool), -torch.inf)
    targets = torch.arange(len(logits))
    return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2


def of_texts(config, model, batch):
    """Neither pairs that share a text nor a pair's own texts are negatives."""
    features = model(input_ids=batch["input_ids"], mask=batch["mask"])["features"]
    candidates = torch.cat([features[:, number] for number in range(1, features.shape[1])])
    logits = features[:, 0] @ candidates.T / config.loss.temperature
    texts = [[bytes(text).removeprefix(b"query: ").strip(b"\0") for text in row] for row in batch["input_ids"].tolist()]
    others = [row[:2] for row in texts] + [row[2:] for row in texts]
    same = [[not {*row[:2]}.isdisjoint(other) for other in others] for row in texts]
    logits = logits.masked_fill(torch.tensor(same).fill_diagonal_(False), -torch.inf)
    return cross_entropy(logits, torch.arange(len(features)))


@cache
def reference(recipe, words, mean_loss):
    (result,) = run_job(plain, recipe, words, mean_loss, strategy="single")
    return result


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Overrides for a file of queries with a passage and a hard negative each; some are another row's query, or
    their own."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [
        {"query": f"what is {n}?", "positive": f"{n} it is", "hard": f"not {n + 1}" * (n % 3 + 1)} for n in range(70)
    ]
    for n in range(0, 70, 5):
        rows[n]["positive"] = rows[n + 1]["query"]
        rows[n + 2]["hard"] = rows[n + 2]["query"]
    rows_in(file, rows)
    model = ("--model.hidden_size=16", "--model.num_layers=1", "--model.num_heads=2")
    return (*SGD, *model, texts_in(file, num_samples=70), '--data.negative_columns=["hard"]')


def texts_in(file, path="json", num_samples=2):
    """The override for a file of queries and passages."""
    texts = {"source": "texts", "query_prefix": "query: ", "max_tokens": 24}
    return f"--data={json.dumps(of_file(file, path, num_samples) | texts)}"


def pair_sources(words, preparation=None):
    return tasks.sources("two_towers")(load_config(EMBED_PYDOC, words), preparation)


# --- every division of a global batch ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "strategy", "world_size", "micro_batch_size", "tolerance"),
    [
        ((*CLIP, FP64), "ddp", 3, 4, 1e-12),
        ((*SIGLIP, FP64), "fsdp", 2, 12, 1e-12),
        ((*CLIP, FP64), "hsdp", 4, 3, 1e-12),
        # DeepSpeed has no fp64.
        (CLIP, "zero3", 2, 4, 1e-5),
    ],
)
def test_images_and_texts(words, strategy, world_size, micro_batch_size, tolerance, run_dir):
    found = (*words, f"--batch.micro_batch_size={micro_batch_size}")
    result = run_job(recorded, CLIP_DIGITS, run_dir, *found, strategy=strategy, world_size=world_size)[0]
    expected = reference(CLIP_DIGITS, words, of_images)
    assert_same(result, expected, STEPS, tolerance)
    scale = [weights["logit_scale"] for weights in expected["weights"]]
    assert not np.array_equal(scale[0], scale[-1])


@pytest.mark.slow
def test_hard_negatives_and_a_smaller_last_batch(pairs, run_dir):
    """Of 70 pairs, 22 are left at the end of an epoch; the evaluation's 9 are fewer than recall@10 ranks."""
    words = (*pairs, FP64, "--batch.drop_last=false", "--data.num_eval_samples=9", "--data.eval_split=validation[:9]")
    result = run_job(recorded, EMBED_PYDOC, run_dir, *words, strategy="fsdp", world_size=3)[0]
    assert_same(result, reference(EMBED_PYDOC, words, of_texts), STEPS, tolerance=1e-12)


@pytest.mark.slow
def test_neither_itself_nor_another_one_of_the_same_image_is_wrong(tmp_path):
    """Of two pairs of the same texts, or of two captions of an image, each finds only what is right."""
    rows_in(tmp_path / "pairs.jsonl", [{"query": "a", "positive": "b"}, {"query": "b", "positive": "a"}])
    (tmp_path / "0.png").write_bytes(png(np.zeros((9, 9, 3), np.uint8)))
    (tmp_path / "pairs.csv").write_text(f"image,caption\n{tmp_path}/0.png,a\n{tmp_path}/0.png,b\n")
    gray = [0.5, 0.5, 0.5]
    images = of_file(tmp_path / "pairs.csv", "csv", 2) | {"max_tokens": 24, "image_size": 16, "mean": gray, "std": gray}
    batch = ("--batch.global_batch_size=2", "--batch.micro_batch_size=1", "--train.stop_after_steps=1")
    for recipe, words in (
        (EMBED_PYDOC, (texts_in(tmp_path / "pairs.jsonl"),)),
        (CLIP_DIGITS, (f"--data={json.dumps(images)}", "--zero_shot=null", "--evaluation.max_samples=null")),
    ):
        train_in_job(recipe, tmp_path / recipe.stem, *words, *batch)
        (logged,) = read_json_lines(tmp_path / recipe.stem / "evaluations.jsonl")
        assert (logged["recall@1"], logged["reverse_recall@1"]) == (1, 1)


# --- what a run leaves ------------------------------------------------------------------------------------------------


def encoded_names(model, config):
    """The vectors of all prompts in one pass of `transformers` itself; shape (classes, templates, features)."""
    names = config.zero_shot.class_names
    prompts = [template.replace("{}", name).encode() for name, template in product(names, config.zero_shot.templates)]
    tokens = torch.tensor([[*prompt.ljust(config.data.max_tokens, b"\0")] for prompt in prompts])
    with torch.no_grad():
        vectors = normalize(model.get_text_features(input_ids=tokens).pooler_output, dim=-1)
    return vectors.view(len(names), -1, config.model.features)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "kind"), [(CLIP, CLIPModel), (SIGLIP, SiglipModel)])
def test_weights_load_with_from_pretrained(words, kind, tmp_path):
    train_in_job(CLIP_DIGITS, tmp_path / "run", *words, strategy="fsdp")
    model, report = kind.from_pretrained(tmp_path / "run/model", output_loading_info=True)
    assert not any(report.values())
    # The metrics are those of the weights, by the other library's forward pass.
    config = load_config(CLIP_DIGITS, words)
    _, source = tasks.sources("two_towers")(config)
    batch = source.fetch(np.arange(30), None)
    with torch.no_grad():
        outputs = model.eval()(batch["input_ids"].squeeze(1), normalize_pixels(batch["pixel_values"], config.data))
    (logged,) = read_json_lines(tmp_path / "run/evaluations.jsonl")
    nearest = outputs.logits_per_text.argmax(dim=1)
    assert logged["reverse_recall@1"] == pytest.approx((batch["labels"][nearest] == batch["labels"]).double().mean())
    classes = normalize(encoded_names(model, config).mean(dim=1), dim=-1)
    is_named = (outputs.image_embeds @ classes.T).argmax(dim=1) == batch["labels"]
    assert logged["zero_shot_accuracy"] == pytest.approx(is_named.double().mean())
    if kind == CLIPModel:
        # A tenth by chance.
        (code,) = re.findall(r"(?s)```python\n(import numpy.*?)```", README.read_text())
        (tmp_path / "probe.py").write_text(code.replace('"runs/clip_digits', f'"{tmp_path}/run'))
        assert 0.2 < runpy.run_path(str(tmp_path / "probe.py"))["accuracy"] < 1


# --- data -------------------------------------------------------------------------------------------------------------


def test_texts_keep_their_end(pairs):
    source, _ = pair_sources((*pairs, "--data.max_tokens=12"))
    batch = source.fetch(np.array([3]), 0)
    assert bytes(batch["input_ids"][0, 0].tolist()) == b"query: what\0"
    assert bytes(batch["input_ids"][0, 1].tolist()) == b"3 it is\0\0\0\0\0"
    assert batch["mask"][0].sum(dim=1).tolist() == [12, 8, 6]
    assert len(set(batch["ids"][0].tolist())) == 3
    # Queries are cut to the same tokens, passages are not.
    other = source.fetch(np.array([4]), 0)
    assert (other["ids"] == batch["ids"]).tolist() == [[True, False, False]]
    # The passage of row 5 is the query of row 6, without its prefix.
    (_, passage, _), (query, *_) = pair_sources(pairs)[0].fetch(np.array([5, 6]), 0)["ids"].tolist()
    assert passage == query


def test_passages_that_are_equal_are_counted(pairs, tmp_path):
    """As the model sees them: of one byte and the end, only the first digit is left."""
    assert [source.remark for source in pair_sources(pairs)] == [None, None]
    assert pair_sources((*pairs, "--data.max_tokens=2"))[0].remark.startswith("10 different passages of 70")
    rows_in(tmp_path / "pairs.jsonl", [{"query": f"{n}", "positive": "ab"[n % 2]} for n in range(70)])
    counted = pair_sources((*SGD, texts_in(tmp_path / "pairs.jsonl", num_samples=70)))
    assert [source.remark for source in counted] == ["2 different passages of 70: a larger batch repeats them"] * 2


NO_TEXT = "has no text in 'query'"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1, 2], f"row 0 of 'train' {NO_TEXT}"),
        (["a", None], f"row 1 of 'train' {NO_TEXT}"),
        (["a", " "], f"row 1 of 'train' {NO_TEXT}"),
        (["a", "b\0"], "row 1 of 'train' has a zero byte in 'query', which is not text; remove it"),
        ([b"a", b"\xff"], "row 1 of 'train' has text in 'query' that is not UTF-8"),
    ],
)
def test_a_text_that_cannot_be_used_is_named(values, told, tmp_path):
    file = tmp_path / "pairs.parquet"
    queries = pyarrow.array(values)
    if isinstance(values[0], bytes):
        queries = queries.view("string")
    parquet.write_table(pyarrow.table({"query": queries, "positive": ["a", "b"]}), file)
    words = (texts_in(file, "parquet"), "--batch.global_batch_size=2", "--batch.micro_batch_size=1")
    with pytest.raises(DataError, match=told):
        pair_sources((*SGD, *words))


def test_texts_with_special_tokens_are_counted(tmp_path):
    queries = ["a", "a<s>", "a odd", *"b" * 67]
    rows_in(tmp_path / "pairs.jsonl", [{"query": query, "positive": "b"} for query in queries])
    tokenizer = word_tokenizer(["[UNK]", "</s>", "<s>", "a", "b"], eos_token="</s>", bos_token="<s>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = (texts_in(tmp_path / "pairs.jsonl", num_samples=70), f"--data.tokenizer={tmp_path}/tokenizer")
    told = "2 texts with special or mostly unknown tokens (the first is row 1)"
    assert told in pair_sources((*SGD, *words))[0].remark


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (CLIP_DIGITS, ["--model.patch_size=5"], "data.image_size: 16 is not a multiple of 5, the side of a patch"),
        (CLIP_DIGITS, ["--loss.name=sigmoid"], 'loss.name: "sigmoid" and model.architecture "siglip" go together'),
        (CLIP_DIGITS, ["--loss.bias=-10"], 'loss.bias: has no effect, because only "sigmoid" has one'),
        (CLIP_DIGITS, [*SIGLIP, "--loss.duplicates=left_out"], "so equal texts are negatives"),
        (
            EMBED_PYDOC,
            ["--loss.min_temperature=0.02"],
            "loss.min_temperature: has no effect, because loss.learned is false",
        ),
        (CLIP_DIGITS, ["--loss.temperature=0.001"], "loss.temperature: 0.001 is below min_temperature"),
        (CLIP_DIGITS, ['--zero_shot.templates=["{}", "a photo"]'], 'zero_shot.templates[1]: given "a photo"; '),
        (CLIP_DIGITS, ['--zero_shot.class_names=["zero"]'], "zero_shot.class_names: 1 names for 10 classes"),
        (
            CLIP_DIGITS,
            ['--data={"source": "pydoc", "num_train_samples": 512, "num_eval_samples": 64, "max_tokens": 32}'],
            '"bert" is for pairs of texts, the others are',
        ),
        (EMBED_PYDOC, ["--loss.learned=true"], "loss.learned: a BERT has no parameter for a temperature"),
        (CLIP_DIGITS, ["--model.end_of_text=2"], "model.end_of_text: with 2, `CLIPModel` would read a text's features"),
        (
            CLIP_DIGITS,
            [*SIGLIP, "--model.features=8"],
            "model.features: it is the width of siglip's image tower; write",
        ),
        (EMBED_PYDOC, ["--data.max_tokens=4096"], "data.max_tokens: 4096 is more than model.max_positions"),
    ],
)
def test_refused(recipe, words, message):
    assert message in "\n".join(problems_of(*words, recipe=recipe))


def test_a_column_that_is_named_twice(pairs):
    for name in ("positive", "hard"):
        problem = problem_of(*pairs, f'--data.negative_columns=["hard", "{name}"]', recipe=EMBED_PYDOC)
        assert f"negative_columns have '{name}' twice; name different columns" in problem


def test_another_end_of_text():
    config = load_config(CLIP_DIGITS, ["--model.end_of_text=1"])
    with pytest.raises(DataError, match=r"model\.end_of_text: 1, but texts of 'bytes' end with 0"):
        tasks.sources("two_towers")(config)


def test_a_run_stays_with_the_tokenizer_that_it_began_with():
    """Its commit is noted beside that of the data."""
    config = load_config(CLIP_B32, ["--data.tokenizer=openai/clip@main"])
    assert config.data.hub_fields == {"tokenizer": "model"}
    pinned = at_commits(config, {"openai/clip@main": "c" * 40})
    assert pinned.data.tokenizer == "openai/clip@" + "c" * 40
