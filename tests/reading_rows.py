"""Rows of local files, as a run reads them."""

import pytest

from largebatch.data.columns import Use
from largebatch.data.hub import open_splits
from largebatch.data.preparation import Preparation
from largebatch.errors import DataError
from small_data import hub_text

Q = {"q": Use("prompt")}


def rows_of(path, reader, uses=Q, **preparation):
    section = hub_text(reader, data_files={"train": str(path), "eval": str(path)})
    train, evaluation = open_splits(section, Preparation(**preparation), uses)
    assert train.to_list() == evaluation.to_list()
    return train.to_list()


def assert_refused(told, path, reader, uses=Q, **preparation):
    with pytest.raises(DataError, match=told):
        rows_of(path, reader, uses, **preparation)
