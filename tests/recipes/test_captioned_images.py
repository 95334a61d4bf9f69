"""Images with captions in tars and tables: members equal `tarfile`'s; what cannot be used is refused or left out."""

import csv
import io
import json
import os
import tarfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

import tasks
from largebatch.data import preparation
from largebatch.data.mixture import open_mixed
from largebatch.data.preparation import NotPrepared, Preparation
from largebatch.errors import DataError
from pictures import gradient_image, jpeg, png

CaptionedImages = tasks.module("two_towers", "config").CaptionedImages
images = tasks.module("two_towers", "images")
NUMBER = 120  # of samples
SIZES = {"num_train_samples": NUMBER, "num_eval_samples": NUMBER}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "HF_HOME", str(tmp_path / "cache"))


def sample(number):
    """An image, JPEG or PNG, whose color tells its number, and its caption."""
    pixels = np.full((40 + number % 7, 50, 3), 2 * number, np.uint8)
    caption = f"number {number}\n" if number % 5 else f"die Nummer „{number}“"
    # A text file of Windows begins with a byte order mark.
    text = caption.encode("utf-8-sig" if number % 3 == 0 else "utf-8")
    return {("jpg" if number % 2 else "png"): (jpeg if number % 2 else png)(pixels), "txt": text}


def write_tar(path, samples):
    """Members as img2dataset names them, in the samples' own order."""
    with tarfile.open(path, "w") as tar:
        for name, members in samples:
            for ending, content in {**members, "json": b"{}"}.items():
                info = tarfile.TarInfo(f"{name}.{ending}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def by_hand(paths):
    """What Python's `tarfile` reads: the images and the captions."""
    found = []
    for path in paths:
        members = {}
        with tarfile.open(path) as tar:
            for member in tar.getmembers():
                name, _, ending = member.name.partition(".")
                members.setdefault(name, {})[ending] = tar.extractfile(member).read()
        found += [(each.get("jpg", each.get("png")), each["txt"].decode("utf-8-sig")) for each in members.values()]
    return found


@pytest.fixture
def shards(tmp_path):
    """Four tars, and the pattern of their names."""
    for part in range(4):
        numbers = range(30 * part, 30 * part + 30)
        write_tar(tmp_path / f"{part + 8:03d}.tar", [(f"{number:09d}", sample(number)) for number in numbers])
    return f"{tmp_path}/{{008..011}}.tar"


def section(files, path="webdataset", **fields):
    if path == "webdataset":
        fields = {"image_column": "jpg;png", "caption_column": "txt"} | fields
    data = {"source": "datasets", "path": path, "data_files": {"train": files, "eval": files}, **SIZES}
    colors = (0.5, 0.5, 0.5)
    return CaptionedImages(
        **(data | {"max_tokens": 8, "image_size": 16, "mean": colors, "std": colors, "num_workers": 2} | fields)
    )


def encode(captions):
    return {
        "length": torch.tensor([len(caption) for caption in captions]),
        "first": torch.tensor([ord(c[0]) for c in captions]),
    }


def opened(config, seed=0, **how):
    return images.open_captioned(config, Preparation(**how), encode, seed)


def test_pairs_are_the_members_that_tarfile_reads(shards, tmp_path):
    config = section(shards)
    train, _ = opened(config)
    expected = by_hand(sorted(tmp_path.glob("*.tar")))
    order = np.random.default_rng(0).permutation(NUMBER)
    rows = train.rows[order]
    assert [(image["bytes"], text) for image, text in zip(rows["jpg;png"], rows["txt"], strict=True)] == [
        expected[place] for place in order
    ]
    batch = train.fetch(order[:9], None)
    assert batch["pixel_values"].shape == (9, 3, 16, 16)
    assert batch["pixel_values"].dtype == torch.uint8
    assert batch["pixel_values"][:, 1, 8, 8].tolist() == pytest.approx([2 * place for place in order[:9]], abs=2)
    assert batch["length"].tolist() == [len(expected[place][1]) for place in order[:9]]
    assert train.weight(batch) == 9
    # Made once, and shared by whoever starts next.
    with pytest.MonkeyPatch.context() as without_tars:
        without_tars.setattr(tarfile, "open", None)
        assert len(opened(config, allowed="nothing")[0]) == NUMBER


def test_captions_in_the_metadata_of_a_folder(tmp_path):
    """`datasets` reads metadata.csv by pandas, for which "NA" and "None" are nothing."""
    captions = ["a cat", "NA", "None", "007"]
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        for number in range(4):
            (tmp_path / split / f"{number}.png").write_bytes(png(np.full((9, 9, 3), number, np.uint8)))
        rows = [json.dumps({"file_name": f"{number}.png", "text": text}) for number, text in enumerate(captions)]
        (tmp_path / split / "metadata.jsonl").write_text("\n".join(rows))
    config = section(None, str(tmp_path), data_files=None, image_column="image", caption_column="text")
    train, _ = opened(config)
    assert [train.pair(number, None)[1] for number in range(4)] == captions
    for split in ("train", "val"):
        (tmp_path / split / "metadata.jsonl").unlink()
        (tmp_path / split / "metadata.csv").write_text("file_name,text\n0.png,NA\n")
    with pytest.raises(
        DataError, match=r"data.caption_column: .* would take texts such as NA in .*/train/metadata.csv"
    ):
        opened(config)


def test_a_job_does_not_try_a_large_data_set(shards, monkeypatch):
    with pytest.raises(NotPrepared, match="must still be prepared"):
        opened(section(shards), allowed="nothing")
    opened(section(shards))
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


def broken(**changes):
    """Samples of which the fourth is another one."""
    return [(f"{number:03d}", changes["members"] if number == 3 else sample(number)) for number in range(8)]


LARGE = io.BytesIO()
Image.new("L", (8000, 6250)).save(LARGE, "PNG")
UNUSABLE = {
    "no caption member": (
        {"jpg": sample(1)["jpg"]},
        r"sample 3 has no 'txt' in UTF-8, in .*a\.tar at byte [\d,]+; write one",
    ),
    "another encoding": (
        {"jpg": sample(1)["jpg"], "txt": b"caf\xe9"},
        r"sample 3 has no 'txt' in UTF-8, in .*a\.tar at byte",
    ),
    "an image cut off": (
        {"jpg": jpeg(np.asarray(gradient_image(300, 200)))[:2000], "txt": b"x"},
        r"the image of sample 3 cannot be decoded: image file is truncated .*, in .*a\.tar at byte [\d,]+; replace",
    ),
    "50 megapixels": (
        {"png": LARGE.getvalue(), "txt": b"x"},
        r"the image of sample 3 cannot be decoded: it has 8,000 x 6,250 pixels, more than 40,000,000",
    ),
}


def test_a_sample_without_an_image_is_refused_or_left_out(tmp_path):
    write_tar(tmp_path / "a.tar", broken(members={"txt": b"x"}))
    with pytest.raises(DataError, match=r"'003' in .* has txt, json, and must have exactly one of jpg, png"):
        opened(section(f"{tmp_path}/a.tar"))
    train, _ = opened(section(f"{tmp_path}/a.tar", on_invalid="skip"))
    assert train.remark == "1 of 8 pairs cannot be used: skipped"


@pytest.mark.parametrize("what", UNUSABLE)
def test_pairs_that_cannot_be_used_are_refused_or_left_out(what, tmp_path):
    members, told = UNUSABLE[what]
    write_tar(tmp_path / "a.tar", broken(members=members))
    fields = {"max_pixels": 40_000_000}
    skipping = section(f"{tmp_path}/a.tar", on_invalid="skip", **fields)
    for _ in range(2):
        train, _ = opened(skipping, allowed="everything")
        assert len(train) == 7
        assert train.remark == "1 of 8 pairs cannot be used: skipped"
        colors = train.fetch(np.arange(7), None)["pixel_values"][:, 0, 8, 8].tolist()
        assert colors == pytest.approx([2 * number for number in (0, 1, 2, 4, 5, 6, 7)], abs=2)
    # What was skipped is not what may be.
    with pytest.raises(DataError, match=told + '.*; or leave such pairs out: data.on_invalid "skip"'):
        opened(section(f"{tmp_path}/a.tar", **fields))


def test_captions_that_are_equal_are_counted(shards, tmp_path):
    assert opened(section(shards))[0].remark is None
    write_tar(tmp_path / "a.tar", [(str(number), sample(number) | {"txt": b"ab"[number % 2 :]}) for number in range(6)])
    train, _ = opened(section(f"{tmp_path}/a.tar"))
    assert train.remark == "2 different captions: a larger batch repeats them"


def test_a_large_image_may_be_allowed(tmp_path):
    write_tar(tmp_path / "a.tar", broken(members={"png": LARGE.getvalue(), "txt": b"x"}))
    assert len(opened(section(f"{tmp_path}/a.tar"))[0]) == 8


def test_tars_that_are_damaged(shards, tmp_path):
    file = tmp_path / "009.tar"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"009\.tar cannot be read: .*; write tars without compression, and copy"):
        opened(section(shards, on_invalid="skip"))


def test_a_list_of_pairs_that_is_damaged(shards, tmp_path):
    opened(section(shards))
    for path in (tmp_path / "cache/largebatch").glob("pairs_*"):
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(DataError, match=r"pairs_.*\.npy is damaged; remove it, and prepare the data again"):
            opened(section(shards))
        path.unlink()
    assert len(opened(section(shards))[0]) == NUMBER


def test_if_none_can_be_used_the_reason_is_told(tmp_path):
    (tmp_path / "data.csv").write_text("image,caption\nnowhere.jpg,a\nnowhere.png,b\n")
    with pytest.raises(DataError, match=r"the image of sample 0 cannot be decoded: .*No such file.*[/']nowhere\.jpg'"):
        opened(section(f"{tmp_path}/data.csv", "csv", on_invalid="skip"))


def test_tables_give_the_same_batches(shards, tmp_path, monkeypatch):
    """Paths are relative to the folder that the job starts in, as all paths of a recipe are."""
    pairs = by_hand(sorted(tmp_path.glob("*.tar")))
    folder = tmp_path / "start/pictures"
    folder.mkdir(parents=True)
    rows = [{"image": f"pictures/{number}", "caption": caption} for number, (_, caption) in enumerate(pairs)]
    for number, (encoded, _) in enumerate(pairs):
        (folder / str(number)).write_bytes(encoded)
    tables = tmp_path / "tables"
    tables.mkdir()
    with (tables / "data.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["image", "caption"])
        table.writeheader()
        table.writerows(rows)
    (tables / "data.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"image": [encoded for encoded, _ in pairs], "caption": [caption for _, caption in pairs]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tables / "data.parquet")
    monkeypatch.chdir(folder.parent)
    indices = np.random.default_rng(1).permutation(NUMBER)[:20]
    expected = opened(section(shards))[0].fetch(indices, 3)
    for kind in ("csv", "json", "parquet"):
        found = opened(section(f"{tables}/data.{kind}", kind))[0].fetch(indices, 3)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_column_of_captions_is_text(tmp_path):
    table = pyarrow.table({"image": [sample(1)["jpg"]] * 2, "caption": [["a", "b"], ["c"]]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DataError, match="sample 0 has no 'caption' in UTF-8"):
        opened(section(f"{tmp_path}/data.parquet", "parquet"))
    with pytest.raises(DataError, match=r"data\.caption_column: no column 'text'; the data has image, caption"):
        opened(section(f"{tmp_path}/data.parquet", "parquet", caption_column="text"))


@pytest.mark.parametrize("ending", ["json", "txt;json", "meta.json"])
def test_all_that_is_known_of_an_image_is_no_caption(ending, shards, tmp_path):
    """img2dataset's .json beside each image holds its address, size and checksum, too; a table's column may be named
    as it likes."""
    told = r"caption_column \".*json\": a \.json file would be read as a whole, .*; write the ending of files"
    with pytest.raises(ValueError, match=told):
        section(shards, caption_column=ending)
    tars = {"name": "tars", "weight": 1, **SIZES}
    other = tars | {"name": "other", "caption_column": ending}
    both = {name: 2 * size for name, size in SIZES.items()}
    with pytest.raises(ValueError, match=rf"sources\[1\] \(other\): {told}"):
        section(shards, sources=[tars, other], **both).sections()
    table = pyarrow.table({"image": [sample(1)["jpg"]] * 2, ending: ["one", "two"]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    assert len(opened(section(f"{tmp_path}/data.parquet", "parquet", caption_column=ending))[0]) == 2


def written_as_files(tmp_path):
    for number in range(12):
        (tmp_path / f"{number}.png").write_bytes(png(np.full((20, 20, 3), 20 * number, np.uint8)))
    rows = "".join(f"{tmp_path}/{number}.png,{'x' * (number + 1)}\n" for number in range(12))
    (tmp_path / "data.csv").write_text("image,caption\n" + rows)
    return f"{tmp_path}/data.csv"


def test_an_image_that_goes_bad_is_replaced_by_seed_and_index(tmp_path, capsys):
    file = written_as_files(tmp_path)
    sources = {
        (kind, seed): opened(section(file, "csv", on_invalid=kind), seed)[0]
        for kind in ("skip", "refuse")
        for seed in (0, 0, 1)
    }
    before = sources["skip", 0].fetch(np.arange(12), 0)
    for number in (2, 5, 7):
        (tmp_path / f"{number}.png").write_bytes(b"gone")
    (tmp_path / "9.png").unlink()
    with pytest.raises(DataError, match=r"the image of sample 2 cannot be decoded"):
        sources["refuse", 0].fetch(np.arange(12), 0)
    capsys.readouterr()
    after = sources["skip", 0].fetch(np.arange(12), 0)
    good = [number for number in range(12) if number not in (2, 5, 7, 9)]
    assert all(torch.equal(after[name][good], before[name][good]) for name in before)
    # Image and caption are of one pair, and one that can be used.
    lengths = after["length"].tolist()
    assert {length - 1 for length in lengths} <= set(good)
    assert after["pixel_values"][:, 0, 8, 8].tolist() == [20 * (length - 1) for length in lengths]
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) >= 4
    assert warnings[0].startswith("warning: the image of sample 2 cannot be decoded: it is not one of JPEG")
    assert warnings[-1].endswith(f"replaced, with {len(warnings)} in all here")
    # Whatever the batch, the epoch and what was read before.
    for places in ([9, 2], [7, 5, 3]):
        assert sources["skip", 0].fetch(np.array(places), 4)["length"].tolist() == [lengths[place] for place in places]
    assert sources["skip", 1].fetch(np.arange(12), 0)["length"].tolist() != lengths
    # At the next start they are still the same pairs, until the table is touched.
    assert len(opened(section(file, "csv", on_invalid="skip"))[0]) == 12
    os.utime(file, (0, 0))
    assert len(opened(section(file, "csv", on_invalid="skip"))[0]) == 8
    for number in good:
        (tmp_path / f"{number}.png").unlink()
    with pytest.raises(DataError, match="cannot be decoded"):
        sources["skip", 0].fetch(np.arange(2), 0)


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

    def red_and_green(index, epoch):
        pixels = train.fetch(np.array([index]), epoch)["pixel_values"][0].float()
        return [pixels[channel].max().item() - pixels[channel].min().item() for channel in (0, 1)]

    areas = [np.prod(red_and_green(0, epoch)) / np.prod(red_and_green(0, None)) for epoch in range(40)]
    assert 0.88 < min(areas) < 0.93
    assert 0.97 < max(areas) <= 1.01
    assert red_and_green(1, 0) == pytest.approx([255 * 267 / 300, 255], abs=6)
    assert red_and_green(1, None) == pytest.approx([255 * 200 / 300, 255], abs=6)
    plain, _ = opened(config.model_copy(update={"train_augmentation": "none"}))
    assert torch.equal(plain.fetch(np.array([0]), 7)["pixel_values"], train.fetch(np.array([0]), None)["pixel_values"])
    other, _ = opened(config, seed=1)
    assert not torch.equal(other.fetch(np.array([0]), 0)["pixel_values"], train.fetch(np.array([0]), 0)["pixel_values"])


def test_a_mixture_of_tars_and_a_table(shards, tmp_path):
    (tmp_path / "more").mkdir()
    file = written_as_files(tmp_path / "more")
    table = {"name": "table", "weight": 1, "path": "csv", "data_files": {"train": file, "eval": file}}
    table |= {"image_column": "image", "caption_column": "caption", "num_train_samples": 12, "num_eval_samples": 12}
    sources = [{"name": "tars", "weight": 3, **SIZES}, table]
    sizes = {"num_train_samples": NUMBER + 12, "num_eval_samples": NUMBER + 12}
    config = section(shards, sources=sources, **sizes)

    def open_one(data, seed):
        return images.open_captioned(data, Preparation(), encode, seed)

    _, evaluation = open_mixed(config, 0, open_one)
    batch = evaluation.fetch(np.array([NUMBER + 3, 5]), None)
    assert batch["pixel_values"][:, 0, 8, 8].tolist() == pytest.approx([60, 10], abs=2)
    assert batch["length"].tolist() == [4, len("die Nummer „5“")]
