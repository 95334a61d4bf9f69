"""Columns of Parquet and Arrow files, whose types must be the same in all files."""

from decimal import Decimal
from itertools import product

import pyarrow
import pytest
from pyarrow import parquet

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError
from reading_rows import Q, assert_refused, rows_of
from small_data import hub_text

UUID = pyarrow.array([b"0" * 16], pyarrow.uuid())
MAP = pyarrow.array([[("a", 1)]], pyarrow.map_("string", "int64"))


def write_parts(folder, *columns):
    for number, column in enumerate(columns):
        parquet.write_table(pyarrow.table(column), folder / f"{number}.parquet")


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ([10001], ["02139"], r"'a' is of type string in .*1\.parquet, and integer in .*0\.parquet; write it with"),
        ([1.0], [7], "is of type integer in .*, and double in "),
        ([True, False], [2, 0], "is of type integer in .*, and bool in "),
        (pyarrow.array([1.5], "float32"), [3.141592653589793], "is of type double in .*, and float in "),
        (["x"], pyarrow.array([0], "date32"), "is of type date32"),
        ([Decimal("0.5")], [Decimal("0.25")], "is of type decimal with 2 decimal places"),
        ([{"n": [1.5]}], [{"n": [7]}], r"'a\.n' is of type integer in .*, and double in "),
        (["x"], None, r"no column 'a'; the data has 'b', in .*1\.parquet; name one of these"),
    ],
)
def test_a_column_has_one_type_in_all_parquet_files(first, second, told, tmp_path):
    """`datasets` would cast each file to the types of the first."""
    write_parts(tmp_path, {"a": first}, {"b": [1]} if second is None else {"a": second})
    assert_refused(told, tmp_path / "*.parquet", "parquet", {"a": Use("prompt")})


def test_a_column_has_one_type_in_all_arrow_files(tmp_path):
    """In one that is sent as a stream, and in one as Feather has it."""
    for number, new, values in ((0, pyarrow.ipc.new_stream, [7]), (1, pyarrow.ipc.new_file, ["007"])):
        table = pyarrow.table({"q": values})
        with new(str(tmp_path / f"{number}.arrow"), table.schema) as file:
            file.write_table(table)
    with pytest.raises(DataError, match=r"'q' is of type string in .*1\.arrow, and integer in .*0\.arrow; write it"):
        open_splits(hub_text(tmp_path, eval_split="train"), Preparation(), Q)


@pytest.mark.parametrize(
    "parts",
    [
        [
            *(pyarrow.array(["a"], kind) for kind in ("string", "large_string", "string_view")),
            pyarrow.array(["b"]).dictionary_encode(),
            pyarrow.array([None]),
        ],
        [pyarrow.array([1], kind) for kind in ("int64", "int8", "int32")],
        [pyarrow.array([Decimal("1000.5")]), pyarrow.array([Decimal("1.5")])],
    ],
    ids=["text", "integers", "decimals"],
)
def test_types_of_parquet_that_are_written_alike(parts, tmp_path):
    write_parts(tmp_path, *({"q": part} for part in parts))
    read = rows_of(tmp_path / "*.parquet", "parquet")
    assert [str(row["q"]) for row in read] == [str(part[0]) for part in parts]


@pytest.mark.parametrize("options", [{}, {"use_dictionary": False, "write_page_index": True}])
def test_parquet_files_that_cat_has_joined_are_refused(options, tmp_path):
    """Of them, pyarrow reads the rows of one, or bytes of one as rows of the other."""
    contents = []
    for size in (0, 1, 3000):
        file = tmp_path / f"{size}.parquet"
        table = pyarrow.table({"q": pyarrow.array([f"{size}"] * size, "string"), "n": range(size)})
        with parquet.ParquetWriter(file, table.schema, **options) as writer:
            # Without rows, it has no group of them.
            if size:
                writer.write_table(table)
        assert size == 0 or len(rows_of(file, "parquet")) == size
        contents.append(file.read_bytes())
    for number, parts in enumerate(product(contents, repeat=2)):
        file = tmp_path / f"joined_{number}.parquet"
        file.write_bytes(b"".join(parts))
        assert_refused(f"{file} was made of several Parquet files by `cat`", file, "parquet")


def test_columns_of_parquet_that_are_not_used_may_have_any_types_and_files(tmp_path):
    """As pandas' index, which is only in shuffled files; optional columns that are used may be missing, too."""
    more = {"i.d": [7], "i": [{"d": 8}], "__index_level_0__": [3]}
    write_parts(tmp_path, {"m": MAP, "q": ["x"]}, {"q": ["y"]} | more)
    uses = Q | {"i.d": Use("prompt", is_optional=True), "system": Use("prompt", is_optional=True)}
    read = rows_of(tmp_path / "*.parquet", "parquet", uses, num_workers=2)
    assert read == [{"q": "x", "i.d": None}, {"q": "y", "i.d": 7}]


@pytest.mark.parametrize(
    ("uses", "second", "told"),
    [
        (Q, {"q": UUID}, r"the column 'q' of .*1\.parquet is of type extension<arrow\.uuid>, which .*; drop it, or"),
        (None, {"q": ["x"], "u": UUID}, r"the column 'u' of .*1\.parquet is of type extension<arrow\.uuid>"),
        (None, {"q": ["x"], "more": [1]}, r"1\.parquet has a column 'more', and the first file has not; drop it"),
    ],
)
def test_columns_of_parquet_that_datasets_does_not_read_are_named(uses, second, told, tmp_path):
    write_parts(tmp_path, {"q": ["x"]}, second)
    assert_refused(told, tmp_path / "*.parquet", "parquet", uses)
