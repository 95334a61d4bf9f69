"""CSV and JSON files as text, against what Python's `csv` and `json` read and what stands in the file."""

import bz2
import csv
import gzip
import json
import lzma
import os
import re
import zipfile

import datasets
import pandas
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError
from reading_rows import Q, assert_refused, rows_of
from small_data import hub_text

TEXT = {"text": Use("text_column")}
CELLS = (
    *("00001", "0.50", "3E5", "12345678901234567890123", "+1", " 1 "),
    *("NA", "None", "null", "nan", "#N/A", "", "True", "yes", "2024-01-05", "2024-01-05T10:00:00Z"),
    *("two\nlines", 'a "quote"', "a,b", "1,5;\t|", "line\u2028separator", "\x0c", "é 😀"),
)


@pytest.mark.parametrize(
    ("separator", "name", "encoding", "first", "told"),
    [
        (",", "rows.csv", "utf-8", "", "','"),
        (",", "rows.csv.gz", "utf-8-sig", "sep=,\n", "','"),
        # As Excel reads it where commas are decimal.
        (";", "rows.csv", "utf-8-sig", "sep=;\r\n", "';'"),
        ("\t", "rows.tsv.gz", "utf-8", "", r"'\t'"),
        ("|", "rows.csv", "utf-8", "", "'|'"),
    ],
)
def test_cells_of_a_csv_are_text(separator, name, encoding, first, told, tmp_path, capsys):
    file = tmp_path / name
    opener = gzip.open if name.endswith(".gz") else open
    with opener(file, "wt", newline="", encoding=encoding) as written:
        written.write(first)
        # Empty lines are left out.
        rows = [("a,b;c", "n", "x"), (), *(("q", cell, 1) for cell in CELLS)]
        csv.writer(written, delimiter=separator).writerows(rows)
    uses = {"n": Use("prompt"), "a,b;c": Use("answer"), "m": Use("system", is_optional=True)}
    read = rows_of(file, "csv", uses, num_workers=2, allowed="everything")
    assert [row["n"] for row in read] == [*CELLS]
    told = f"cells of the data are separated by {told}\n1 column of the data that nothing reads: x\n"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["lines", "list"])
def test_strings_of_json_are_text_and_numbers_as_they_are_written(kind, tmp_path):
    numbers = ("1", "0.50", "3E5", "-0.0", "12345678901234567890123", "true", "NaN")
    rows = [json.dumps({"q": cell, "list": [{"n": 0.5, "text": cell}]}) for cell in CELLS]
    rows += [f'{{"q": {number}, "tools": "x", "list": [0.50, 1E-7, 30e0, NaN]}}' for number in numbers]
    rows.append('{"q": null}')
    file = tmp_path / "rows.json"
    content = "\n\n".join(rows) + "\n" if kind == "lines" else "[" + ",\n".join(rows) + "]"
    file.write_text(content, encoding="utf-8-sig")
    uses = {
        "list": Use("messages.column", "any"),
        "system": Use("messages.system", is_optional=True),
        "tools": Use("messages.tools", "any", is_optional=True),
    }
    read = rows_of(file, "json", Q | uses)
    assert [row["q"] for row in read] == [*CELLS, *numbers, None]
    assert [json.loads(row["list"]) for row in read[: len(CELLS)]] == [[{"n": 0.5, "text": cell}] for cell in CELLS]
    assert {row["system"] for row in read} == {None}
    assert read[-2]["tools"] == "x"
    assert read[-2]["list"] == "[0.5, 1e-07, 30.0, NaN]"


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        ("csv", b"q,q\n1,2\n", "'q' occurs twice, so one of its values would be lost"),
        ("csv", b'q\ta\n"Wer?\t1\nx\t2\nund"\t3\n', "line 4: a cell in quotes has tabs and line breaks, as rows have"),
        ("json", b'{"q": "a\\u0000b"}\n', "line 1: 'q' has a zero byte, which is not text; remove it"),
        ("csv", b'q,a\n1,2\n\xef\xbb\xbf"q","a"\n1,2\n', "line 3: it has the names of the columns again, as in joined"),
        ("csv", b"q,a\n1,2\na,q\n2,1\n", "in joined files; remove it or, if it is data, rename the columns"),
        ("csv", b"q,a\n1,2\n1,2,3\n", "line 3: it has 3 cells, but the header has 2"),
        ("csv", b'q,a\n1,"2\n', "line 2: unexpected end of data"),
        (
            "csv",
            b"q,a\n" + b"x,2\n" * 4000 + b"\xe9,2\n",
            "line 4002: 'q' has the byte 0xe9, which is not text; remove it, or save",
        ),
        ("csv", "q,a\n1,2\n".encode("utf-16"), "cannot be read: its names are not in UTF-8; save it as UTF-8"),
        ("csv", b"q^a\n1^2\n", "data.prompt: no column 'q'; the data has 'q^a', in the header of "),
        # The quote takes in what follows, up to any length.
        ("csv", b'"a\n' + b"2\n" * 100_000, "the data has 'a" + r"\n2" * 26 + ", in the header of "),
        ("json", b'{"q": 1, "q": 2}\n', "line 1: 'q' occurs twice"),
        ("json", b'{"q": 1}\n["q"]\n', 'line 2 is ["q"], not an object'),
        ("json", b'[{"q": 1},\n\n"q"]', 'item 2 of the list is "q", not an object'),
        ("json", b'[{"q": 1}, {"q": ["b"]}]', "item 2 of the list: 'q' holds [\"b\"], which is not text"),
        ("json", b'[{"q": 1},\n{"q" 2}]', "the list: Expecting ':' delimiter: line 2 column 6"),
        (
            "json",
            b'{"q": 1}\n{"q": {"b": [1, 2]}}\n',
            """line 2: 'q' holds {"b": [1, 2]}, which is not text; write text""",
        ),
        ("json", b'{"q": {"b": [0.1234567890123456789]}}\n', "line 1: 'q' holds the number 0.1234567890123456789, "),
        (
            "json",
            b'{"q": 1}\n{"q": "\xe9"}\n',
            "line 2: 'utf-8' codec can't decode byte 0xe9 in position 7: invalid continuation byte; save it as UTF-8",
        ),
        ("json", b"\x1f\x8b\x08", "it is compressed; end its name with .gz"),
        ("json", b'{"q": "\\ud800"}\n', "line 1: 'q' has half of a character, 0xd800, which is not text"),
        ("json", b'{\n"q": 1\n}\n', "line 2 column 1 (char 2); write one object per line, or one list"),
    ],
)
def test_what_would_be_lost_or_changed_is_refused(reader, content, message, tmp_path):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(DataError) as caught:
        rows_of(tmp_path / "rows", reader)
    assert message in str(caught.value)
    assert not message.startswith("data.") or str(caught.value).startswith(message)
    assert str(tmp_path / "rows") in str(caught.value)


@pytest.mark.parametrize("value", ["1", "0.5", "true", "[1]"])
def test_what_is_not_text_in_a_column_of_texts(value, tmp_path):
    (tmp_path / "rows").write_text(f'{{"q": "a", "system": "b"}}\n{{"q": "a", "system": {value}}}\n')
    uses = Q | {"system": Use("messages.system", "string", is_optional=True)}
    assert_refused(
        f"line 2: 'system' holds {re.escape(value)}, which is not text; write text", tmp_path / "rows", "json", uses
    )


def test_each_csv_has_its_own_separator(tmp_path, capsys):
    (tmp_path / "0.csv").touch()
    (tmp_path / "1.csv").write_text("q;a\n1;2\n")
    (tmp_path / "2.csv").write_text("a,q\n3,4\n")
    uses = {"q": Use("prompt"), "a": Use("answer")}
    read = rows_of(tmp_path / "*.csv", "csv", uses, allowed="everything")
    assert read == [{"q": "1", "a": "2"}, {"q": "4", "a": "3"}]
    assert "cells of the data are separated by ',' or ';'\n" in capsys.readouterr().out
    (tmp_path / "3.csv").write_text("q\ta\n")
    assert len(rows_of(tmp_path / "*.csv", "csv", uses)) == 2
    (tmp_path / "4.csv").write_text("a,u\u0308\n5,6\n")
    told = r"no column '\\xfc'; the data has 'a', 'u\\u0308', in the header of .*4\.csv"
    assert_refused(told, tmp_path / "4.csv", "csv", {"ü": Use("prompt")})


def test_line_breaks_in_a_tsv(tmp_path):
    """Of fewer tabs than a row has, they are text; with as many, rows may be lost, whatever the column is."""
    (tmp_path / "rows.tsv").write_text('q\ta\tcode\n"1\t\n"\t"2\n"\t"\tx\n"\n')
    uses = {"q": Use("prompt"), "a": Use("answer")}
    assert rows_of(tmp_path / "rows.tsv", "csv", uses) == [{"q": "1\t\n", "a": "2\n"}]
    for end in "\n\r":
        (tmp_path / "lost.tsv").write_text(end.join(["q\ta\tcode", '1\t2\t"foo', '3\t4\tbar"', ""]), newline="")
        assert_refused(
            r"lost\.tsv cannot be read: line 3: a cell in quotes has tabs", tmp_path / "lost.tsv", "csv", uses
        )


@pytest.mark.parametrize(
    ("content", "cell"),
    [
        ('"two\nlines";q\r\n1;2\r\n', "2"),
        # Of one column, nothing is a separator.
        ("sep=;\nq\n1;2\n", "1;2"),
        ("\nq\n1;2\n", "1;2"),
        ("q\n1;2\n", "1;2"),
        # Spreadsheets have columns without a name.
        (",q,\nx,2,y\n", "2"),
    ],
)
def test_headers(content, cell, tmp_path):
    (tmp_path / "rows.csv").write_text(content, newline="")
    assert rows_of(tmp_path / "rows.csv", "csv") == [{"q": cell}]


def test_numbers_in_another_order_than_in_the_header_are_data(tmp_path):
    (tmp_path / "rows.csv").write_text("0,1\n1,0\n")
    read = rows_of(tmp_path / "rows.csv", "csv", {"0": Use("prompt"), "1": Use("answer")})
    assert read == [{"0": "1", "1": "0"}]


def test_a_byte_order_mark_is_no_text(tmp_path):
    """At the start, or within joined files."""
    file = tmp_path / "rows"
    for reader, lines in (("csv", ("text", '"a"', '"a"')), ("json", ['{"text": "a"}'] * 2)):
        file.write_text("".join(f"\ufeff{line}\n" for line in lines))
        assert rows_of(file, reader, TEXT) == [{"text": "a"}] * 2
    file.write_bytes(b"\xef\xbb\xbfa\n" * 2)
    # Another program has read and cached it before.
    datasets.load_dataset("text", data_files={"train": [str(file)], "validation": str(file)})
    assert rows_of(file, "text", TEXT) == [{"text": "a"}] * 2


def test_lines_of_plain_text_are_rows(tmp_path, capsys):
    """As Python reads them, whose universal newlines are no other characters; and an empty file has no rows."""
    texts = (*CELLS[:14], "", " a ", '"b', "line\u2028separator", "\x0c\x1c\x85")
    (tmp_path / "1.txt").write_bytes("\r\n".join(texts).encode())
    (tmp_path / "2.txt").write_bytes(b"")
    (tmp_path / "3.txt").write_bytes(b"c\rd\n")
    read = rows_of(tmp_path / "*.txt", "text", TEXT, allowed="everything")
    assert [row["text"] for row in read] == [*texts, "c", "d"]
    files = f"3 files in {tmp_path}: 1.txt, 2.txt, 3.txt\n"
    assert capsys.readouterr().out == f"train: {files}validation: {files}"


def test_a_plain_text_that_is_not_utf8_is_named_with_its_line(tmp_path):
    file = tmp_path / "1.txt"
    file.write_bytes(b"1\r\n\n\xe9\n")
    (tmp_path / "2.txt").write_text("1\n")
    told = rf"{file}: line 3: 'text' has the byte 0xe9, which is not text; remove it, or save"
    # Of two processes, one fails.
    assert_refused(told, tmp_path / "*.txt", "text", TEXT, num_workers=2)


def test_every_file_has_the_columns_that_are_used(tmp_path):
    (tmp_path / "0.jsonl").write_text("")  # no row is missing
    (tmp_path / "1.jsonl").write_text('{"q": 1}\n{"q": 1, "late": 2}\n')
    assert rows_of(tmp_path / "*.jsonl", "json") == [{"q": "1"}, {"q": "1"}]
    (tmp_path / "2.jsonl").write_text('{"question": 1}\n')
    assert_refused(r"data\.prompt: no column 'q'; the data has 'question', in .*2\.jsonl", tmp_path / "*.jsonl", "json")


@pytest.mark.parametrize(("reader", "content"), [("csv", "text\n"), ("json", "[]"), ("text", "")])
def test_files_without_rows_are_refused_unless_others_have_some(reader, content, tmp_path):
    (tmp_path / "0").write_text(content)
    assert_refused(
        r"^data\.data_files: no file of 'train' has a row; name files that have some", tmp_path / "0", reader, TEXT
    )
    (tmp_path / "1").write_text({"csv": "text\na\n", "json": '{"text": "a"}\n', "text": "a\n"}[reader])
    assert rows_of(tmp_path / "?", reader, TEXT) == [{"text": "a"}]


@pytest.mark.parametrize(
    ("reader", "write"),
    [
        ("json", lambda file: file.write_text('{"instruction": "add", "output": 3}\n{"input": "1 2"}\n')),
        ("parquet", pandas.DataFrame({"instruction": ["add"], "input": ["1 2"], "output": ["3"]}).to_parquet),
    ],
)
def test_columns_that_nothing_reads_are_named(reader, write, tmp_path, capsys):
    file = tmp_path / "rows"
    write(file)
    for used, told in (
        (("instruction", "output"), "1 column of the data that nothing reads: input\n"),
        (("instruction", "input", "output"), ""),
    ):
        rows_of(file, reader, {column: Use("prompt", "any", is_optional=True) for column in used}, allowed="everything")
        assert capsys.readouterr().out == told
    rows_of(file, reader, {"instruction": Use("prompt", "any", is_optional=True)})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("ending", "write"),
    [("parquet", parquet.write_table), ("csv", lambda rows, file: rows.to_pandas().to_csv(file, index=False))],
)
def test_a_split_that_is_not_used_may_lack_columns(ending, write, tmp_path):
    """As the answers of a test set."""
    rows = pyarrow.table({"q": ["x"], "text": ["x"]})
    for name in ("train", "validation"):
        write(rows, tmp_path / f"{name}.{ending}")
    write(rows.drop("text"), tmp_path / f"test.{ending}")
    train, _ = open_splits(hub_text(tmp_path, eval_split="validation[:1]"), Preparation(), TEXT)
    assert train["text"][:] == ["x"]
    with pytest.raises(
        DataError, match=r"^data\.path: there is no split 'eval', only train, validation, test; write one"
    ):
        open_splits(hub_text(tmp_path, eval_split="eval"), Preparation(), TEXT)


def test_a_file_of_another_size_is_read_anew_even_if_its_time_is_the_same(tmp_path):
    file = tmp_path / "rows.csv"
    for content in ("q\nold\n", "q\nnewer\n"):
        file.write_text(content)
        os.utime(file, (1_700_000_000, 1_700_000_000))
        assert rows_of(file, "csv") == [{"q": content.split()[1]}]


def test_a_zip_may_hold_one_file(tmp_path):
    file = tmp_path / "rows.zip"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.jsonl", '{"q": "one"}\n')
    assert rows_of(file, "json") == [{"q": "one"}]
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("b.jsonl", '{"q": "two"}\n')
    assert_refused(rf"^{file} holds other files; unpack it$", file, "json")


@pytest.mark.parametrize("name", ["rows.tar.gz", "rows.tgz"])
def test_a_tar_is_refused(name, tmp_path):
    (tmp_path / name).write_bytes(gzip.compress(b'{"q": "one"}\n'))
    assert_refused(f"{name} holds other files", tmp_path / name, "json")


def test_csv_and_guessed_json_of_the_hub_are_refused(hub):
    """There `datasets` reads them, and guesses types."""
    rows = b'{"text": "00001", "whole": 1, "date": "2024-01-05", "decimal": 0.50, "is": true}\n'
    hub.commit("datasets/user/json", {"train.json": rows, "validation.json": rows})
    hub.commit("datasets/user/csv", {"train.csv": b"text\n00001\n", "validation.csv": b"text\n00001\n"})
    section = hub_text("user/json")
    # A column that is not there has no type.
    optional = {"system": Use("messages.system", is_optional=True)}
    train, _ = open_splits(section, Preparation(), TEXT | {"whole": Use("prompt")} | optional)
    assert [train[0][name] for name in ("text", "whole")] == ["00001", 1]
    for name in ("date", "decimal", "is"):
        with pytest.raises(DataError, match=rf"data\.prompt: `datasets` has taken .* {name!r} for .*hf download"):
            open_splits(section, Preparation(), {name: Use("prompt")})
    with pytest.raises(DataError, match=r"data\.path: `datasets` would take cells of the hub's CSV .*hf download"):
        open_splits(hub_text("user/csv"), Preparation(), TEXT)


@pytest.mark.parametrize(
    ("ending", "compress"),
    [
        ("gz", gzip.compress),
        ("bz2", bz2.compress),
        ("xz", lzma.compress),
        ("zst", zstandard.compress),
        # Without its directory, which is at the end.
        ("zip", bytes),
    ],
)
def test_a_compressed_file_that_is_damaged_is_named(ending, compress, tmp_path):
    whole = compress(b'{"q": 1}\n' * 10_000)
    # The last one is damaged at the start of its second stream.
    damaged = (whole[: len(whole) // 2], b"no archive", whole[:40] + b"?" * 40, whole + b"?" + whole[1:])
    for number, content in enumerate(damaged):
        file = tmp_path / f"{number}.jsonl.{ending}"
        file.write_bytes(content)
        assert_refused(rf"^{file} cannot be read: .*; compress it again", file, "json")


def test_a_window_of_zstd_that_is_too_large(tmp_path):
    """As `zstd --long=31` writes it."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    writer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    file = tmp_path / "rows.jsonl.zst"
    file.write_bytes(writer.compress(b'{"q": 1}\n') + writer.flush())
    assert_refused(rf"^{file} cannot be read: .*memory.*; compress it again \(zstd: without --long\)$", file, "json")
