"""Images with captions in tars and tables: members equal `tarfile`'s; what cannot be used is refused or left out."""

import io
import os
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet

import tasks
from chat_templates import word_tokenizer
from largebatch.data import preparation
from largebatch.data.mixture import open_mixed
from largebatch.data.preparation import NotPrepared, Preparation
from largebatch.errors import DataError
from pictures import gradient_image, jpeg, png, write_tar
from small_data import of_file, rows_in

CaptionedImages = tasks.module("two_towers", "config").CaptionedImages
images = tasks.module("two_towers", "images")
NUMBER = 120  # of samples


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "HF_HOME", str(tmp_path / "cache"))


def sample(number):
    """An image, JPEG or PNG, whose color tells its number, and its caption."""
    pixels = np.full((40 + number % 7, 50, 3), 2 * number, np.uint8)
    # A text file of Windows begins with a byte order mark.
    text = f"Nummer „{number}“\n{'!' * (number % 7)}".encode("utf-8-sig" if number % 3 == 0 else "utf-8")
    return {"jpg": jpeg(pixels), "txt": text} if number % 2 else {"png": png(pixels), "txt": text}


def write_samples(path, samples):
    """Members as img2dataset names them, in the samples' own order."""
    members = {}
    for number, content in samples.items():
        members |= {f"{number:09d}.{ending}": each for ending, each in {**content, "json": b"{}"}.items()}
    write_tar(path, members)


def by_hand(number):
    """The image and the caption that a sample should give."""
    image, text = sample(number).values()
    return image, text.decode("utf-8-sig")


@pytest.fixture
def shards(tmp_path):
    """Four tars, and the pattern of their names."""
    for part in range(4):
        samples = {number: sample(number) for number in range(30 * part, 30 * part + 30)}
        write_samples(tmp_path / f"{part + 8:03d}.tar", samples)
    return f"{tmp_path}/{{008..011}}.tar"


def section(files, path="webdataset", **fields):
    if path == "webdataset":
        fields = {"image_column": "jpg;png", "caption_column": "txt"} | fields
    gray = (0.5, 0.5, 0.5)
    shape = {"max_tokens": 40, "image_size": 16, "mean": gray, "std": gray, "num_workers": 2}
    return CaptionedImages(**(of_file(files, path, NUMBER) | shape | fields))


class Texts(tasks.module("two_towers", "texts").Texts):
    def __init__(self, data):
        super().__init__(SimpleNamespace(data=data, model=SimpleNamespace(vocab_size=256)))

    def encode(self, rows):
        return {**super().encode(rows), "length": torch.tensor([len(caption) for (caption,) in rows])}


def opened(config, seed=0, **how):
    return images.open_captioned(config, Preparation(**how), Texts(config), seed)


def assert_refused(config, told):
    with pytest.raises(DataError, match=told):
        opened(config)


def test_pairs_are_the_members_of_tars(shards):
    train, _ = opened(section(shards))
    order = np.random.default_rng(0).permutation(NUMBER)
    batch = train.fetch(order, None)
    assert batch["pixel_values"].shape == (NUMBER, 3, 16, 16)
    assert batch["pixel_values"].dtype == torch.uint8
    assert batch["pixel_values"][:, 1, 8, 8].tolist() == pytest.approx(2 * order, abs=2)
    assert batch["length"].tolist() == [len(by_hand(number)[1]) for number in order]
    assert train.weight(batch) == NUMBER


def test_captions_in_the_metadata_of_a_folder(tmp_path):
    """`datasets` reads metadata.csv by pandas, for which "NA" and "None" are nothing."""
    captions = ["NA", "007"]
    rows = [{"file_name": f"{number}.png", "text": text} for number, text in enumerate(captions)]
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for row in rows:
            (tmp_path / split / row["file_name"]).write_bytes(sample(2)["png"])
        rows_in(tmp_path / split / "metadata.jsonl", rows)
    config = section(None, str(tmp_path), data_files=None, image_column="image", caption_column="text")
    train, _ = opened(config)
    assert [train.pair(number, None)[1] for number in range(2)] == captions
    (tmp_path / "train/metadata.jsonl").unlink()
    (tmp_path / "train/metadata.csv").write_text("file_name,text\n0.png,NA\n1.png,007\n")
    assert_refused(config, r"data.caption_column: .* would take texts such as NA in .*/train/metadata.csv")


def test_a_job_does_not_try_a_large_data_set(shards, monkeypatch):
    with pytest.raises(NotPrepared, match="must still be prepared"):
        opened(section(shards), allowed="nothing")
    opened(section(shards))
    # Made once, and shared by whoever starts next.
    assert len(opened(section(shards), allowed="nothing")[0]) == NUMBER
    monkeypatch.setattr(images, "BYTES_OF_AN_IMAGE", 2**30)
    with pytest.raises(NotPrepared, match=r"data\.prepare: 122,880\.0 MiB would have to be prepared"):
        opened(section(shards, max_pixels=3000))


@pytest.mark.parametrize(
    ("pattern", "told"),
    [
        ("{008..012}", r"no file matches '.*/012\.tar'"),
        ("{011..008}", r"\{011\.\.008\} in .* is not a range of at most 1,000,000 numbers; write the lowest"),
        ("{008..11}", r"\{008\.\.11\} in .* is not a range"),
        ("{0..99999999}", r"is not a range of at most"),
    ],
)
def test_patterns_of_shards(pattern, told, shards):
    with pytest.raises(ValueError, match=told):
        opened(section(shards.replace("{008..011}", pattern)))


@pytest.fixture
def broken(tmp_path):
    """From the members of a fourth sample to a tar in which the other seven are good."""

    def write(members):
        write_samples(tmp_path / "a.tar", {number: sample(number) for number in range(8)} | {3: members})
        return f"{tmp_path}/a.tar"

    return write


LARGE = io.BytesIO()
Image.new("L", (8000, 6250)).save(LARGE, "PNG")


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"txt": b"x"}, r"'000000003' in .* has txt, json, and must have exactly one of jpg, png"),
        ({"jpg": sample(1)["jpg"]}, r"sample 3 has no 'txt', in .*a\.tar at byte [\d,]+; write one"),
        (
            {"jpg": sample(1)["jpg"], "txt": b"caf\xe9"},
            r"sample 3, in .*a\.tar at byte [\d,]+, has the byte 0xe9 in 'txt', which is not text; remove",
        ),
        (
            {"jpg": sample(1)["jpg"], "txt": b"red\0apple"},
            "sample 3, in .*, has a zero byte in 'txt', which is not text; ",
        ),
        (
            {"png": LARGE.getvalue(), "txt": b"x"},
            "the image of sample 3 cannot be decoded: it has 8,000 x 6,250 pixels, more than 40,000,000 .*"
            '; or leave such pairs out: data.on_invalid "skip"',
        ),
    ],
    ids=["no image", "no caption", "another encoding", "a zero byte", "50 megapixels"],
)
def test_pairs_that_cannot_be_used_are_refused_or_left_out(members, told, broken):
    tar = broken(members)
    skipping = section(tar, on_invalid="skip", max_pixels=40_000_000)
    for _ in range(2):
        train, _ = opened(skipping, allowed="everything")
        assert len(train) == 7
        assert train.remark == "1 of 8 pairs cannot be used: skipped"
        colors = train.fetch(np.arange(7), None)["pixel_values"][:, 0, 8, 8].tolist()
        assert colors == pytest.approx([2 * number for number in (0, 1, 2, 4, 5, 6, 7)], abs=2)
    # What was skipped is not what may be.
    assert_refused(section(tar, max_pixels=40_000_000), told)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("</s>", "sample 0, in .*: the tokenizer does not know most of 'txt'; write it otherwise, or remove it"),
        ("Nummer", "sample 0, in .*, has 'Nummer' in 'txt', which the tokenizer reads as a special token; write it"),
    ],
)
def test_a_caption_that_the_tokenizer_does_not_read_as_it_is(end, told, shards, tmp_path):
    word_tokenizer(["[UNK]", end], eos_token=end).save_pretrained(tmp_path)
    assert_refused(section(shards, tokenizer=str(tmp_path)), told)


def test_images_and_captions_that_are_equal_are_counted(shards, tmp_path):
    assert opened(section(shards))[0].remark is None
    # An image with two captions, and one that two images have.
    samples = [sample(number // 2 * 2) | {"txt": b"abcbef"[number:][:1]} for number in range(6)]
    write_samples(tmp_path / "a.tar", dict(enumerate(samples)))
    train, _ = opened(section(f"{tmp_path}/a.tar"))
    repeated = "a larger batch repeats them"
    assert train.remark == f"3 different images: {repeated}; 5 different captions: {repeated}"
    image, caption = train.fetch(np.arange(6), 0)["ids"].T.tolist()
    assert [image.index(each) for each in image] == [0, 0, 2, 2, 4, 4]
    assert [caption.index(each) for each in caption] == [0, 1, 2, 1, 4, 5]
    assert opened(section(shards, max_tokens=8))[0].remark.startswith("1 different caption:")


def test_a_large_image_may_be_allowed(broken):
    assert len(opened(section(broken({"png": LARGE.getvalue(), "txt": b"x"})))[0]) == 8


def test_if_none_can_be_used_the_reason_is_told(tmp_path):
    (tmp_path / "data.csv").write_text("image,caption\nnowhere.jpg,a\nnowhere.png,b\n")
    assert_refused(
        section(f"{tmp_path}/data.csv", "csv", on_invalid="skip"),
        r"the image of sample 0 cannot be decoded: .*No such file.*[/']nowhere\.jpg'",
    )


def test_a_table_gives_the_same_batches(shards, tmp_path, monkeypatch):
    """Paths are relative to the folder that the job starts in, as all paths of a recipe are."""
    (tmp_path / "pictures").mkdir()
    rows = []
    for number in range(NUMBER):
        image, caption = by_hand(number)
        rows.append({"image": f"pictures/{number}", "caption": caption})
        (tmp_path / rows[-1]["image"]).write_bytes(image)
    rows_in(tmp_path / "data.json", rows)
    monkeypatch.chdir(tmp_path)
    indices = np.random.default_rng(1).permutation(NUMBER)[:20]
    expected = opened(section(shards))[0].fetch(indices, 3)
    found = opened(section("data.json", "json"))[0].fetch(indices, 3)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def parquet_of(folder, **captions):
    """A file of two images with a column of captions."""
    file = f"{folder}/data.parquet"
    parquet.write_table(pyarrow.table({"image": [sample(1)["jpg"]] * 2, **captions}), file)
    return file


def test_a_column_of_captions_is_text(tmp_path):
    file = parquet_of(tmp_path, caption=[["a", "b"], ["c"]])
    assert_refused(section(file, "parquet"), "sample 0 has a list in 'caption', in .*; write one text in each row")
    assert_refused(
        section(file, "parquet", caption_column="text"),
        r"data\.caption_column: no column 'text'; the data has 'image', 'caption'",
    )


@pytest.mark.parametrize("ending", ["json", "txt;meta.json"])
def test_all_that_is_known_of_an_image_is_no_caption(ending, shards, tmp_path):
    """img2dataset's .json beside each image holds its address, size and checksum, too; a table's column may be named
    as it likes."""
    told = r"caption_column \".*json\": a \.json file would be read as a whole, .*; write the ending of files"
    with pytest.raises(ValueError, match=told):
        section(shards, caption_column=ending)
    tars = {"name": "tars", "weight": 1, "num_train_samples": 60, "num_eval_samples": 60}
    other = tars | {"name": "other", "caption_column": ending}
    with pytest.raises(ValueError, match=rf"sources\[1\] \(other\): {told}"):
        section(shards, sources=[tars, other]).sections()
    file = parquet_of(tmp_path, **{ending: ["one", "two"]})
    train, _ = opened(section(file, "parquet", caption_column=ending))
    assert train.pair(1, None)[1] == "two"


def written_as_files(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(png(np.full((20, 20, 3), 20 * number, np.uint8)))
    rows = "".join(f"{tmp_path}/{number}.png,{'x' * (number + 1)}\n" for number in range(12))
    (tmp_path / "data.csv").write_text("image,caption\n" + rows)
    return f"{tmp_path}/data.csv"


def test_an_image_that_goes_bad_is_replaced_by_seed_and_index(tmp_path, capsys):
    file = written_as_files(tmp_path)
    skipping = section(file, "csv", on_invalid="skip")
    source, _ = opened(skipping)
    of_another_seed, _ = opened(skipping, 1)
    refusing, _ = opened(section(file, "csv"))
    for number in (2, 5, 7):
        (tmp_path / f"{number}.png").write_bytes(b"gone")
    (tmp_path / "9.png").unlink()
    with pytest.raises(DataError, match=r"the image of sample 2 cannot be decoded"):
        refusing.fetch(np.arange(12), 0)
    capsys.readouterr()
    after = source.fetch(np.arange(12), 0)
    good = [0, 1, 3, 4, 6, 8, 10, 11]
    # Image and caption are of one pair, and one that can be used.
    lengths = after["length"].tolist()
    assert [lengths[number] - 1 for number in good] == good
    assert {length - 1 for length in lengths} == {*good}
    assert after["pixel_values"][:, 0, 8, 8].tolist() == [20 * (length - 1) for length in lengths]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) >= 4
    assert warnings[0].startswith("warning: the image of sample 2 cannot be decoded: it is not one of JPEG")
    assert warnings[-1].endswith(f"replaced, with {len(warnings)} in all here")
    # Whatever the batch, the epoch and what was read before.
    for places in ([9, 2], [7, 5, 3]):
        assert source.fetch(np.array(places), 4)["length"].tolist() == [lengths[place] for place in places]
    assert of_another_seed.fetch(np.arange(12), 0)["length"].tolist() != lengths
    # At the next start they are still the same pairs, until the table is touched.
    assert len(opened(skipping)[0]) == 12
    os.utime(file, (0, 0))
    assert len(opened(skipping)[0]) == 8
    for number in good:
        (tmp_path / f"{number}.png").unlink()
    with pytest.raises(DataError, match="cannot be decoded"):
        source.fetch(np.arange(2), 0)


def test_a_tar_that_is_cut_off_while_it_is_read(shards, tmp_path):
    """A map of it would end the process by SIGBUS."""
    train, _ = opened(section(shards, on_invalid="skip"))
    os.truncate(tmp_path / "010.tar", 5000)
    assert train.fetch(np.arange(NUMBER), 0)["length"].shape == (NUMBER,)
    assert train.num_replaced > 20


def test_crops_are_those_of_open_clip(tmp_path):
    """90 to 100 % of the area; of a photograph that is 3:2, no such box has a ratio up to 4:3, and the largest one is
    taken. Evaluation sees the largest square."""
    for name, shape in (("square", (100, 100)), ("wide", (300, 200))):
        gradient_image(*shape).save(tmp_path / f"{name}.png")
    (tmp_path / "data.csv").write_text(f"image,caption\n{tmp_path}/square.png,a\n{tmp_path}/wide.png,b\n")
    config = section(f"{tmp_path}/data.csv", "csv", image_size=50)
    train, _ = opened(config)

    def pixels(index, epoch, source=train):
        return source.fetch(np.array([index]), epoch)["pixel_values"][0].numpy()

    def red_and_green(*place):
        return np.ptp(pixels(*place).astype(int), axis=(1, 2))[:2]

    areas = [np.prod(red_and_green(0, epoch)) / np.prod(red_and_green(0, None)) for epoch in range(40)]
    assert 0.88 < min(areas) < 0.93
    assert 0.97 < max(areas) <= 1.01
    assert red_and_green(1, 0) == pytest.approx([255 * 267 / 300, 255], abs=6)
    assert red_and_green(1, None) == pytest.approx([255 * 200 / 300, 255], abs=6)
    plain, _ = opened(config.model_copy(update={"train_augmentation": "none"}))
    assert np.array_equal(pixels(0, 7, plain), pixels(0, None))
    other, _ = opened(config, seed=1)
    assert not np.array_equal(pixels(0, 0, other), pixels(0, 0))


def test_a_mixture_of_tars_and_a_table(shards, tmp_path):
    (tmp_path / "more").mkdir()
    table = {"name": "table", "weight": 1, "image_column": "image", "caption_column": "caption"}
    table |= of_file(written_as_files(tmp_path / "more"), "csv", 12)
    tars = {"name": "tars", "weight": 3, "num_train_samples": NUMBER, "num_eval_samples": NUMBER}
    config = section(shards, sources=[tars, table], num_train_samples=NUMBER + 12, num_eval_samples=NUMBER + 12)
    _, evaluation = open_mixed(config, 0, opened)
    batch = evaluation.fetch(np.array([NUMBER + 3, 5]), None)
    assert batch["pixel_values"][:, 0, 8, 8].tolist() == pytest.approx([60, 10], abs=2)
    assert batch["length"].tolist() == [4, len("Nummer „5“\n!!!!!")]
