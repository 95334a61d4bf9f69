"""What a recorded config and one of now would train differently."""

import pytest

from largebatch.config import as_json, load_config
from largebatch.config.differences import differences
from paths import PYDOC


@pytest.mark.parametrize(
    ("words", "found"),
    [((), {}), (("--batch.drop_last=false",), {"batch.drop_last": (None, False)})],
)
def test_a_field_that_an_earlier_version_did_not_have_was_at_its_default(words, found):
    """Also one of the objects in a list."""
    words = ('--optimizer.groups=[{"parameters": "*wte*"}]', *words)
    recorded = as_json(load_config(PYDOC, words[:1]))
    del recorded["batch"]["drop_last"]
    del recorded["optimizer"]["groups"][0]["lr_factor"]
    assert differences(recorded, load_config(PYDOC, words)) == found


def test_a_field_that_is_gone_is_a_difference():
    recorded = as_json(load_config(PYDOC))
    recorded["batch"]["gone"] = 1
    del recorded["batch"]["drop_last"]
    assert differences(recorded, load_config(PYDOC)) == {"batch.gone": (1, None)}


def test_a_section_in_a_list_is_compared_by_its_fields():
    groups = '--optimizer.groups=[{"parameters": "*.bias"}, {"parameters": "*.%s", "lr_factor": 0.5}]'
    recorded = as_json(load_config(PYDOC, (groups % "weight",)))
    found = differences(recorded, load_config(PYDOC, (groups % "wte",)))
    assert found == {"optimizer.groups.1.parameters": ("*.weight", "*.wte")}


def test_a_section_that_was_null_has_changed_with_all_of_its_fields():
    recorded = as_json(load_config(PYDOC, ("--learning_rate.warmup=null",)))
    found = differences(recorded, load_config(PYDOC, ('--learning_rate.warmup={"duration": {"steps": 5}}',)))
    assert found == {
        f"learning_rate.warmup.{field}": (None, value)
        for field, value in (("duration.steps", 5), ("shape", "gradual"), ("start", "base_lr"))
    }
