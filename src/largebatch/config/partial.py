"""The valid part of an invalid config, so that checks across fields can still be made."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from largebatch.config.sections import Section


def valid_part(section: type[Section], raw: Mapping[str, Any]) -> Section | None:
    """The section with only those fields that are valid; reading any other raises an AttributeError.

    Args:
        section: The class of the section.
        raw: The parsed JSON of the section.

    Returns:
        The part, or None if the fields are valid one by one but not together.
    """
    wrong = _wrong_keys(section, raw)
    # Without the wrong ones, the others may be wrong together: a duration is left without its unit.
    if None in wrong | _wrong_keys(section, {key: value for key, value in raw.items() if key not in wrong}):
        return None
    valid: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        key = field.alias or name
        if key not in raw:
            if not field.is_required():
                valid[name] = field.get_default(call_default_factory=True, validated_data=valid)
        elif key not in wrong:
            annotated: Any = Annotated[(field.annotation, *field.metadata, Field(discriminator=field.discriminator))]
            valid[name] = TypeAdapter(annotated).validate_json(json.dumps(raw[key]), strict=True)
        elif (inner := _inner_section(field, raw[key])) and (part := valid_part(inner, raw[key])):
            valid[name] = part
    part = section.model_construct(**valid)
    # `model_construct` puts defaults in place of wrong fields.
    for name in section.model_fields.keys() - valid.keys():
        part.__dict__.pop(name, None)
    return part


def _wrong_keys(section: type[Section], raw: Mapping[str, Any]) -> set[int | str | None]:
    """The keys that are wrong; None is among them if the section as a whole is."""
    try:
        section.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        return {next(iter(details["loc"]), None) for details in error.errors(include_url=False)}
    return set()


def _inner_section(field: FieldInfo, raw: Any) -> type[Section] | None:
    """The section that a field's JSON is meant to be: the only one, or the one that its discriminator names."""
    if not isinstance(raw, Mapping):
        return None
    annotations = get_args(field.annotation) or (field.annotation,)
    sections = [each for each in annotations if isinstance(each, type) and issubclass(each, Section)]
    if isinstance(field.discriminator, str):
        key = field.discriminator
        sections = [each for each in sections if raw.get(key) in get_args(each.model_fields[key].annotation)]
    return sections[0] if len(sections) == 1 else None
